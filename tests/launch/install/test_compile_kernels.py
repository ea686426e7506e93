"""`allspan warm` hands on what the kernels' own process says. That process is one made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from allspan.launch.commands import warm
from allspan.launch.install import doctor
from allspan.protos.api.errors import ConfigError, InternalError, Unavailable

RUN = subprocess.run
FIGURES = {"compiled": 2, "found": 3, "num_bytes": 2048, "seconds": 1.5}
REPORT = {"compiler": "NVRTC 13.0", "folder": "/home/kernels", "architectures": {"sm_90a": FIGURES}}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What this file holds is the other process's standard output; it then ends with code 1."""
    answer = tmp_path / "answer"

    def run(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.stdout.write(open({str(answer)!r}).read()); sys.exit(1)"
        return RUN([sys.executable, "-c", code, *words], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "run", run)
    return answer


def test_it_says_what_was_compiled_and_where(says: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says.write_text(json.dumps(REPORT))
    assert warm.run(["--arch", "sm_90a"]) == 0
    told = capsys.readouterr().err
    assert "sm_90a: compiled 2 sources in 1.5 s by NVRTC 13.0, 3 were there; 2.0 KiB in /home/kernels" in told
    assert warm.run(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architectures"] == [{"architecture": "sm_90a", **FIGURES}]


@pytest.mark.parametrize(
    ("answer", "error"),
    [('{"refused": "why"}', ConfigError), ('{"error": "why"}', Unavailable), ("", InternalError)],
)
def test_its_errors_are_those_of_a_command(says: Path, answer: str, error: type[Exception]) -> None:
    says.write_text(answer)
    with pytest.raises(error, match="why" if answer else "said nothing"):
        warm.run([])


@pytest.mark.parametrize(
    ("facts", "gpus", "status", "words"),
    [
        ({"missing": ""}, ["a GPU"], "ok", "CuPy 14.2.0, NVRTC 13.0"),
        (
            {"missing": "no CuPy", "cupy": None},
            ["a GPU"],
            "warn",
            "no CuPy, NVRTC 13.0; kernels for the GPU cannot run",
        ),
        ({"missing": "no GPU", "cupy": None}, [], "ok", "no CuPy, NVRTC 13.0; no GPU wants them"),
    ],
)
def test_doctor_says_what_the_kernels_want(
    facts: dict[str, str | None],
    gpus: list[str],
    status: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        doctor, "_probe", lambda words: (0, json.dumps({"torch": "13.0", "cupy": "14.2.0", "nvrtc": "13.0"} | facts))
    )
    monkeypatch.setattr(doctor, "find_gpus", lambda: gpus)
    finding = doctor.check_cuda()
    assert (finding.status, finding.name) == (status, "cuda")
    assert words in finding.text
    assert bool(finding.fix) == (status != "ok")
