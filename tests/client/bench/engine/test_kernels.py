"""`allspan bench kernels` sums up what a process for each group says. Those processes are made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allspan.launch.commands import bench
from allspan.protos.api.errors import Unavailable

POPEN = subprocess.Popen
DEVICE = {
    "device": {"name": "a GPU", "multiprocessors": 1, "copy_tb_s": 4.0, "tflops": 700.0},
    "versions": {"torch": "2"},
}


def case(name: str, group: str, ours: float, peer: float, **changes: Any) -> dict[str, Any]:
    figures = [
        {"side": "allspan", "is_ours": True, "us": ours, "spread": 0.0, "refused": ""},
        {"side": "FlashInfer", "is_ours": False, "us": peer, "spread": 0.0, "refused": ""},
        {"side": "another", "is_ours": False, "us": 0.0, "spread": 0.0, "refused": "7 query heads"},
    ]
    about = {"group": group, "name": name, "num_bytes": 300_000_000, "flops": 1, "figures": figures}
    return {"case": about | {"wrong": "", "left_out": "", "ratio": peer / ours} | changes}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, tuple[list[dict[str, Any]], int]]:
    """Of each group: lines, and the code that its process ends with."""
    answers: dict[str, tuple[list[dict[str, Any]], int]] = {}

    def popen(words: list[str], **options: Any) -> subprocess.Popen[str]:
        lines, code = answers[words[3]]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return POPEN([sys.executable, "-c", f"import sys; print({text!r}, end=''); sys.exit({code})"], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return answers


def test_cases_are_told_as_they_come_and_summed_up(says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    says["decode"] = [DEVICE, case("a", "decode", 100, 100), case("b", "decode", 100, 400)], 0
    assert bench.run(["kernels", "--only", "decode", "--json"]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["summary"]["decode"] == {
        "cases": 2,
        "compared": 2,
        "ratio": pytest.approx(2),
        "least": 1,
        "wrong": [],
    }
    assert report["command"] == "allspan bench kernels --only decode --json"
    assert told.err.splitlines()[1].split("  ") == [
        "decode",
        "b",
        "allspan 100.0 µs (3.00 TB/s, 75 % of a copy)",
        "FlashInfer 400.0 µs",
        "another refuses (7 query heads)",
        "4.00 x",
    ]


def test_a_wrong_kernel_and_a_broken_process_make_it_fail(says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    says["decode"] = [DEVICE, case("a", "decode", 1, 1, wrong="allspan: NaN", ratio=None)], 0
    says["prefill"] = [DEVICE, case("c", "prefill", 1, 2)], 134
    assert bench.run(["kernels", "--only", "decode,prefill"]) == 1
    told = capsys.readouterr()
    assert "WRONG: allspan: NaN" in told.err
    assert "prefill: ended with code 134 after 'c'; the cases behind it are missing" in told.out
    assert "a GPU: copy 4.00 TB/s" in told.out


def test_without_a_gpu_it_says_so(says: Any) -> None:
    says["decode"] = [{"error": "torch finds no GPU"}], 1
    with pytest.raises(Unavailable, match="torch finds no GPU"):
        bench.run(["kernels", "--only", "decode"])
