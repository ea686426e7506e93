"""Tables of a saved run of `allspan bench kernels`: every case, the slower ones too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.client.bench.engine.kernel_tables import markdown, read_report
from allspan.launch.commands.bench import _run_kernels
from allspan.protos.api.errors import ConfigError

ROOT = Path(__file__).parents[4]
RUN = ROOT / "docs/runs/2026-11-22-h200-kernels.json"


def case(name: str, ours: float, peer: float | None, **changes: Any) -> dict[str, Any]:
    figures = [{"side": "allspan", "is_ours": True, "us": ours, "spread": 0.0, "refused": ""}]
    refused = "" if peer else "7 query heads"
    figures.append({"side": "FlashInfer", "is_ours": False, "us": peer or 0.0, "spread": 0.0, "refused": refused})
    about = {"group": "decode", "name": name, "num_bytes": 1, "flops": 1, "figures": figures, "wrong": ""}
    return about | {"left_out": "", "ratio": peer / ours if peer else None} | changes


def report(*cases: dict[str, Any]) -> dict[str, Any]:
    device = {"name": "a GPU", "multiprocessors": 1, "copy_tb_s": 4.0, "tflops": 700.0}
    summary = {"decode": {"cases": len(cases), "compared": 2, "ratio": 1.0, "least": 0.5, "wrong": []}}
    return {"date": "2026-01-02T00:00", "versions": {"torch": "2"}, "devices": [device], "summary": summary} | {
        "cases": list(cases)
    }


def test_slower_cases_refusals_and_wrong_results_are_in_the_table() -> None:
    given = report(
        case("fast", 2.0, 4.0), case("slow", 400.0, 200.0), case("odd", 1.0, None), case("bad", 1.0, 2.0, wrong="off")
    )
    text = markdown(given)
    assert "| Decode attention | 4 | 2 | 1 | 1.00 | **0.50** |" in text
    assert "| fast | 2.0 | 4.0 | 2.00 |" in text
    assert "| slow | 400 | 200 | **0.50** |" in text
    assert "| odd | 1.0 | refused |  |" in text
    assert "| bad | 1.0 | 2.0 | wrong |" in text


def test_the_page_of_figures_holds_every_case_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_kernels(["--markdown", str(RUN)]) == 0
    printed = capsys.readouterr().out
    assert printed in (ROOT / "docs/kernel-figures.md").read_text()
    assert all(f"| {case['name']} |" in printed for case in json.loads(RUN.read_text())["cases"])


@pytest.mark.parametrize("text", ["", "[]", '{"cases": []}'])
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--markdown is {path}"):
        read_report(str(path))
