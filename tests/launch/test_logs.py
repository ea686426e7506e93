"""`allspan serve` says what it was told, in the form that it was told to."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from allspan.launch.commands.serve import given
from allspan.launch.console import say
from allspan.launch.logs import ForeignLines, LogConfig, begin_log
from allspan.launch.settings import serve_parser
from allspan.protos.cluster.logs import FORMAT, LEVEL, REQUESTS
from support.serving import run_allspan


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process's logging as it was, afterwards."""
    monkeypatch.setenv(FORMAT, "text")
    monkeypatch.setenv(LEVEL, "info")
    root, requests = logging.getLogger(), logging.getLogger(REQUESTS)
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(requests, "level", requests.level)
    return monkeypatch


@pytest.mark.usefixtures("log")
def test_everything_that_the_launcher_says_is_json_when_it_is_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    begin_log(LogConfig(log_format="json", log_level="warning"))
    say("Server is ready")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("allspan.gateway").info("not told")
    logging.captureWarnings(False)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["source"], line["message"]) for line in told] == [
        ("launcher", "Server is ready"),
        ("gateway", "Invalid HTTP request received."),
    ]


@pytest.mark.usefixtures("log")
def test_without_lines_for_requests_failures_are_told_still(capsys: pytest.CaptureFixture[str]) -> None:
    begin_log(LogConfig(log_requests=False))
    logging.captureWarnings(False)
    logging.getLogger(REQUESTS).info("finished")
    logging.getLogger(REQUESTS).warning("failed")
    logging.getLogger("allspan.gateway").info("running: 1 reqs")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["failed", "running: 1 reqs"]


def test_what_others_write_becomes_json_line_by_line() -> None:
    foreign = ForeignLines("ranks")
    ours = b'{"time": "2026", "level": "info"}\n'
    shown = foreign.pass_on(b"prte: wa")
    shown += foreign.pass_on(b"rning\n\n" + ours[:10])
    shown += foreign.pass_on(ours[10:] + b'Traceback "x"\xff\n  File\nrest')
    told = [json.loads(line) for line in shown.splitlines()]
    assert [line.get("message") for line in told] == ["prte: warning", None, 'Traceback "x"�', "File"]


def test_what_differs_from_the_defaults_is_told_and_no_key(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('ranks = 2\napi-key = "very-secret-key"\n')
    parser = serve_parser()
    defaults = {action.dest: action.default for action in reversed(parser._actions)}
    assert given(parser.parse(["model"]), defaults) == "all flags at their defaults"
    namespace = parser.parse(["model", f"--config={config}", "--page-size=64"])
    assert given(namespace, defaults) == "api_key=***, page_size=64, ranks=2"


def test_an_error_that_ends_the_program_is_json_too(tmp_path: Path) -> None:
    done = run_allspan("serve", str(tmp_path / "none"), "--log-format=json")
    (told,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, told["level"], told["source"]) == (3, "error", "launcher")
