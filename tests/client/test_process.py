"""A cluster started as a process: its ready line, the ways it can fail, and its end. `serve` is a script here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.client.process import ClusterProcess, flags
from allspan.protos.api.errors import (
    AllspanError,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    QueueFull,
    Unavailable,
)
from support.fake_worker import FakeCluster
from support.waiting import wait_until

Start = Callable[..., ClusterProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs Python code as `serve`."""

    def run(code: str, **options: object) -> ClusterProcess:
        script = tmp_path / "serve.py"
        script.write_text("import json, os, signal, sys, time\n" + code)
        return ClusterProcess("tiny", options, quiet=True, command=[sys.executable, str(script)])

    return run


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_options_become_flags() -> None:
    options = {"ranks": 2, "max_model_len": 64, "oversubscribe": True, "restart": False, "dtype": None, "cpus": (0, 2)}
    assert flags(options) == ["--ranks=2", "--max-model-len=64", "--oversubscribe", "--no-restart", "--cpus=0,2"]
    with pytest.raises(ConfigError, match="'ranks 2'"):
        flags({"ranks 2": 1})


def test_the_ready_line_names_the_run_directory(start: Start, tmp_path: Path) -> None:
    code = """
print("a line of no interest")
print("ALLSPAN READY " + json.dumps({"run_dir": os.getcwd(), "model": "tiny", "argv": sys.argv[1:]}), flush=True)
signal.pause()
"""
    process = start(code, ranks=3)
    try:
        assert process.wait_ready(20) == Path.cwd()
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert arguments[2:-1] == ["tiny", "--no-gateway", f"--parent-pid={os.getpid()}", "--ranks=3"]
        assert os.getsid(process.pid) == process.pid
    finally:
        process.close()
    assert not is_alive(process.pid)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (
            "sys.exit('allspan serve: --ranks is 9, must be at most 4')",
            Unavailable,
            "^--ranks is 9, must be at most 4$",
        ),
        ("print('allspan: error: no flag --x', file=sys.stderr); sys.exit(2)", ConfigError, "^no flag --x$"),
        ("print('first\\nmodel.gguf ends early', file=sys.stderr); sys.exit(3)", CheckpointError, "^model.gguf ends"),
        ("sys.exit(7)", Unavailable, "ended with code 7"),
        ('print(\'ALLSPAN FAILED {"code": "queue_full", "message": "m"}\'); sys.exit(1)', QueueFull, "^m$"),
        (
            "print('loading', file=sys.stderr, flush=True); signal.pause()",
            DeadlineExceeded,
            r"\(1 s\); last line: loading",
        ),
    ],
)
def test_a_start_that_fails_raises_the_cause_in_one_line(
    start: Start, code: str, error: type[AllspanError], words: str
) -> None:
    process = start(code)
    with pytest.raises(error, match=words) as raised:
        process.wait_ready(1 if error is DeadlineExceeded else 20)
    assert "\n" not in raised.value.message
    assert not is_alive(process.pid)


def test_one_that_ignores_sigterm_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allspan.client.process.STOP_TIMEOUT_S", 0.3)
    code = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); print(\'ALLSPAN READY {"run_dir": "/"}\', flush=True)\n'
    process = start(code + "while True: time.sleep(1)")
    process.wait_ready(20)
    started = time.monotonic()
    process.close()
    process.close()
    assert not is_alive(process.pid)
    assert time.monotonic() - started < 5


def test_its_log_goes_to_standard_error_unless_quiet(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    process = ClusterProcess("tiny", {}, command=[sys.executable, "-c", "import sys; sys.exit('loading 40 %')"])
    with pytest.raises(Unavailable):
        process.wait_ready(20)
    assert "loading 40 %" in capsys.readouterr().err
    with pytest.raises(Unavailable):
        start("sys.exit('loading 40 %')").wait_ready(20)
    assert capsys.readouterr().err == ""


def test_an_engine_starts_its_cluster_uses_it_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    ended = tmp_path / "ended"
    script = tmp_path / "serve.py"
    script.write_text(
        f"import pathlib, signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        f'print(\'ALLSPAN READY {{"run_dir": "{run_dir}"}}\', flush=True)\n'
        f"number = signal.sigwait([signal.SIGTERM])\n"
        f"pathlib.Path({str(ended)!r}).write_text(str(int(number)))\n"
    )
    monkeypatch.setattr("allspan.client.process._COMMAND", (sys.executable, str(script)))
    with FakeCluster(run_dir), ClientEngine("tiny", ranks=2, startup_timeout=20) as engine:
        assert engine.generate([1], SamplingParams(max_tokens=2))[0].token_ids == (2, 3)
    wait_until(ended.exists)
    assert ended.read_text() == str(int(signal.SIGTERM))


def test_a_cluster_that_is_ready_but_cannot_be_attached_to_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    script = tmp_path / "serve.py"
    script.write_text(
        f"import os, pathlib, signal\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        f'print(\'ALLSPAN READY {{"run_dir": "{tmp_path}"}}\', flush=True)\n'
        f"signal.pause()\n"
    )
    monkeypatch.setattr("allspan.client.process._COMMAND", (sys.executable, str(script)))
    with pytest.raises(ConfigError, match="no cluster to attach to"):
        ClientEngine("tiny", startup_timeout=20)
    assert not is_alive(int(pid_file.read_text()))
