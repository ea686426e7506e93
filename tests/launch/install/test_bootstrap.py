"""The installer of launch/demo.sh, with a made-up pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allspan.launch.install import bootstrap
from allspan.launch.install.bootstrap import BootstrapError, brings_cuda, install_torch, size_text

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installer is run from a checkout; the tests' copy of it may be an installed one."""
    monkeypatch.setattr(bootstrap, "ROOT", ROOT)


def entry(name: str, version: str, url: str = "file:///nonesuch") -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": url}}


CPU = [entry("torch", "2.13.0+cpu"), entry("sympy", "1.14")]
CUDA = [entry("torch", "2.13.0"), entry("nvidia-cublas", "13.1"), entry("triton", "3.7")]


class Pip:
    """Answers dry runs from two indexes and notes what is installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, default: Any, cpu_index: Any) -> None:
        self.installed: list[list[str]] = []
        self._answers = {False: default, True: cpu_index}
        monkeypatch.setattr(bootstrap, "dry_run", self._dry_run)
        monkeypatch.setattr(bootstrap, "pip", self.installed.append)
        monkeypatch.setattr(bootstrap, "quiet", list)

    def _dry_run(self, arguments: list[str]) -> Any:
        answer = self._answers["--index-url" in arguments]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_cpu_build_is_installed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, CPU, BootstrapError("never asked"))
    install_torch(gpu=False)
    assert pip.installed == [["install", "torch==2.13.0"]]


def test_gigabytes_of_cuda_are_avoided(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pip = Pip(monkeypatch, CUDA, CPU[:1])
    install_torch(gpu=False)
    assert pip.installed[0] == ["install", "--no-deps", "--index-url", bootstrap.CPU_INDEX, "torch==2.13.0"]
    assert "to download" in capsys.readouterr().err


def test_a_gpu_that_is_asked_for_gets_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, CUDA, BootstrapError("never asked"))
    install_torch(gpu=True)
    assert pip.installed == [["install", "--force-reinstall", "torch==2.13.0"]]
    Pip(monkeypatch, CPU, CPU)
    with pytest.raises(BootstrapError, match="only a CPU build"):
        install_torch(gpu=True)


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", ["cuda13"]), ("12.8", ["cuda12"]), ("", []), ("15.1", [])])
def test_cupy_comes_for_the_cuda_that_torch_has(monkeypatch: pytest.MonkeyPatch, cuda: str, extra: list[str]) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=f"{cuda}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: done)
    assert bootstrap.cuda_extra() == extra


@pytest.mark.parametrize("answer", [BootstrapError("No matching distribution"), CUDA[:1]])
def test_without_the_cpu_index_it_says_what_to_do_and_lets_the_next_python_try(
    monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    pip = Pip(monkeypatch, CUDA, answer)
    with pytest.raises(BootstrapError) as caught:
        install_torch(gpu=False)
    assert caught.value.code == bootstrap.NO_CPU_TORCH
    assert all(word in str(caught.value) for word in ("ALLSPAN_TORCH_INDEX", "ALLSPAN_VENV", "--gpu"))
    assert pip.installed == []


def test_sizes_are_summed_and_unknown_ones_admitted(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"x" * 3_000_000)
    known = entry("a", "1", (tmp_path / "a.whl").as_uri())
    assert size_text([known]) == "3 MB in 1 package"
    assert size_text([known, entry("b", "1")]) == "at least 3 MB in 2 packages"


def test_cuda_is_known_by_what_comes_with_it() -> None:
    assert brings_cuda(CUDA)
    assert not brings_cuda(CPU)


def test_pips_reason_is_its_last_error() -> None:
    assert bootstrap.reason_of("WARNING: a\nERROR: first\nERROR: second\nnote: b") == "second"
    assert bootstrap.reason_of("") == "it gave no reason"


def test_the_fingerprint_changes_with_files_and_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CMakeLists.txt", "constraints.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "worker").mkdir()
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    prints = [bootstrap.fingerprint(["server"]), bootstrap.fingerprint(["server", "dev"])]
    (tmp_path / "worker/a.py").write_text("1")
    prints.append(bootstrap.fingerprint(["server"]))
    monkeypatch.setattr(bootstrap, "find_compiler", lambda: None)
    prints.append(bootstrap.fingerprint(["server"]))
    assert len(set(prints)) == 4
    (tmp_path / "worker/README.md").write_text("words")
    assert bootstrap.fingerprint(["server"]) == prints[-1]


def demo(path: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "launch/demo.sh"
    env = {"PATH": str(path), "HOME": str(path)} | environment
    return subprocess.run(["/bin/bash", script, *argv], capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A $PATH with a few tools and no Python."""
    for tool in ("dirname", "rm", "sed", "grep", "cut", "bash", "mkdir"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if os.path.exists(f"/bin/{tool}") else f"/usr/bin/{tool}")
    return tmp_path


def system(folder: Path, name: str) -> None:
    (folder / "uname").write_text(f"#!/bin/bash\necho {name}\n")
    (folder / "uname").chmod(0o755)


@pytest.mark.parametrize(
    ("name", "word"), [("Darwin", "client only"), ("MINGW64_NT-10.0", "WSL2"), ("Plan9", "needs Linux")]
)
def test_other_systems_are_told_at_once(bare: Path, name: str, word: str) -> None:
    system(bare, name)
    run = demo(bare)
    assert (run.returncode, len(run.stderr.splitlines())) == (1, 1)
    assert word in run.stderr


def test_without_a_python_one_line_says_what_to_install(bare: Path) -> None:
    system(bare, "Linux")
    (bare / "python3.12").write_text(
        "#!/bin/bash\necho 'command not found' >&2; exit 127\n"
    )  # a version manager's stub
    (bare / "python3.12").chmod(0o755)
    run = demo(bare, ALLSPAN_VENV=str(bare / "venv"))
    assert (run.returncode, len(run.stderr.splitlines())) == (1, 1), run.stderr
    assert "python3.14" in run.stderr
    assert "install" in run.stderr


def test_a_wrong_flag_and_a_wrong_environment_are_named(bare: Path) -> None:
    system(bare, "Linux")
    run = demo(bare, "--sreve")
    assert (run.returncode, "unknown flag --sreve" in run.stderr) == (2, True)
    run = demo(bare, ALLSPAN_VENV="/etc")
    assert (run.returncode, "ALLSPAN_VENV is /etc" in run.stderr) == (1, True)


def test_a_folder_that_cannot_be_written_to_is_not_blamed_on_python(bare: Path) -> None:
    system(bare, "Linux")
    (bare / "file").write_text("")
    run = demo(bare, ALLSPAN_VENV=str(bare / "file/venv"))
    assert (run.returncode, len(run.stderr.splitlines())) == (1, 1), run.stderr
    assert f"cannot write to {bare}/file; set ALLSPAN_VENV" in run.stderr


def test_the_reason_why_a_python_makes_no_environment_is_told(bare: Path) -> None:
    system(bare, "Linux")
    text = '#!/bin/bash\n[ "$1" = -m ] && { echo one; echo "disk full"; exit 1; }\nexit 0\n'
    (bare / "python3.12").write_text(text)
    (bare / "python3.12").chmod(0o755)
    run = demo(bare, ALLSPAN_VENV=str(bare / "venv"))
    assert run.returncode == 1
    assert "that failed: disk full" in run.stderr


def test_a_checkout_that_cannot_be_written_to_is_built_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(bootstrap, "torch_version", lambda gpu: "2.13.0")
    monkeypatch.setattr(bootstrap, "report_kernels", lambda compiler: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    calls: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "pip", calls.append)
    bootstrap.install(gpu=False, dev=False, pinned=False)
    (option,) = [word for word in calls[0] if word.startswith("build-dir=")]
    assert not option.startswith(f"build-dir={ROOT}")


def test_a_pip_that_hangs_is_ended_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "PIP_TIMEOUT_S", 0.01)
    with pytest.raises(bootstrap.BootstrapError, match=r"took more than 0\.01 s"):
        bootstrap.dry_run(["nonesuch"])


def test_an_install_that_is_up_to_date_touches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(bootstrap, "torch_version", lambda gpu: "2.13.0")
    calls: list[Any] = []
    monkeypatch.setattr(bootstrap, "pip", calls.append)
    monkeypatch.setattr(bootstrap, "report_kernels", lambda compiler: None)
    bootstrap.install(gpu=False, dev=False, pinned=False)
    bootstrap.install(gpu=False, dev=False, pinned=False)
    assert len(calls) == 1
    bootstrap.install(gpu=False, dev=True, pinned=True)
    build, *both, _ = map(json.dumps, calls[1:])
    wheel, packages = sorted(both, key=lambda call: "wheel" not in call)
    assert "nanobind==" in build
    assert all(name in packages for name in ("constraints.txt", "pytest==", "torch>=", "grpcio>="))
    assert "--no-build-isolation" not in build + packages
    assert all(name in wheel for name in ("--no-deps", "--no-build-isolation", str(ROOT)))
