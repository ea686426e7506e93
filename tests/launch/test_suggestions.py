"""What users of other programs type is answered with the right flag or command, or with why there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from allspan.client.bench.serving.serve import SERVE
from allspan.launch.cli import COMMANDS, main
from allspan.launch.commands import bench, chat, generate
from allspan.launch.settings import serve_parser
from allspan.protos.config import known_elsewhere


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tp-size", "2"], ["use --ranks"]),
        (["--ctx-size=4096"], ["use --max-model-len"]),
        (["-c", "4096"], ["use --max-model-len"]),
        (["-ngl", "99"], ["not a flag of allspan", "--device cuda"]),
        (["-hf", "org/name"], ["without a flag", "allspan serve ORG/NAME"]),
        (["--mem-fraction-static", "0.8"], ["--gpu-memory-utilization", "--kv-cache-bytes"]),
        (["--seed", "1"], ["allspan generate", "each request"]),
        (["--lora-paths", "a=x"], ["use --lora-modules"]),
        (["--max_loaded_loras", "4"], ["use --max-cpu-loras"]),
        (["--temp", "0.1"], ["--temperature is a flag of `allspan generate`"]),
    ],
)
def test_a_flag_of_another_program_is_answered_by_its_meaning(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        serve_parser().parse(["model", *argv])
    line = capsys.readouterr().err
    assert (caught.value.code, line.count("\n")) == (2, 1)
    assert all(word in line for word in ["unknown flag", *words]), line


def test_a_flag_of_this_command_is_never_taken_for_another_programs() -> None:
    assert generate.make_parser().parse(["--seed", "1", "--prompt=-c"]).seed == 1


def test_every_replacement_exists() -> None:
    parsers = (serve_parser(), chat.make_parser(), generate.make_parser(), bench.make_parser(SERVE))
    flags = {flag for parser in parsers for flag in parser._option_string_actions} | {"--version"}
    for name, text in known_elsewhere.FLAGS.items():
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
        assert not [flag for flag in named if flag not in flags], (name, text)
        assert name not in parsers[0]._option_string_actions, name
    for name, text in known_elsewhere.COMMANDS.items():
        assert text.split()[0].rstrip(",") in (*COMMANDS, "--version", "COMMAND"), name
        assert name not in COMMANDS


@pytest.mark.parametrize(
    ("word", "meant"), [("models", "list"), ("quantize", "convert"), ("run", "chat"), ("org/x", "allspan serve org/x")]
)
def test_a_command_of_another_program_is_answered_by_its_meaning(
    capsys: pytest.CaptureFixture[str], word: str, meant: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help", "all"], ["bench", "--help"], ["ps"]])
def test_a_reader_that_leaves_ends_a_command_without_a_word(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-m", "allspan.launch.cli", *argv], stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert (run.returncode, run.stderr) == (141, b"")


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("allspan.launch.cli.command_module", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "allspan plan: interrupted\n"
