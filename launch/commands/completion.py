"""`allspan completion SHELL`: a script that completes commands and flags. Making it imports every command; using it
starts no Python."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from allspan.launch.cli import COMMANDS, command_module
from allspan.launch.commands import bench
from allspan.protos.config.flags import Parser

SHELLS = {
    "bash": "source <(allspan completion bash)",
    "zsh": "allspan completion zsh >FOLDER/_allspan, where FOLDER is in $fpath",
    "fish": "allspan completion fish >~/.config/fish/completions/allspan.fish",
}
"""Shells, and how each takes the script."""


def make_parser() -> Parser:
    parser = Parser(
        "allspan completion",
        "Prints a script that completes commands and flags: " + "; ".join(SHELLS.values()) + ".",
    )
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help="Names the shell: bash, zsh or fish.")
    return parser


def run(argv: Sequence[str]) -> int:
    import shtab

    shell = make_parser().parse(argv).shell
    print(shtab.complete(whole_parser(), shell=shell), end="")
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser with every command below it, which only the completion uses."""
    whole = argparse.ArgumentParser(prog="allspan")
    whole.add_argument("-v", "--version", action="store_true", help="Prints the version.")
    parsers = {name: command_module(name).make_parser() for name in COMMANDS if name != "bench"}
    measuring = argparse.ArgumentParser(prog="allspan bench")
    _put_below(measuring, {name: bench.make_parser(row) for name, row in bench.BENCHMARKS.items()}, {})
    _put_below(whole, parsers | {"bench": measuring}, COMMANDS)
    return whole


def _put_below(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], abouts: Mapping[str, str]
) -> None:
    import shtab

    below = parser.add_subparsers()
    for name, command in commands.items():
        below.add_parser(name, help=abouts.get(name, command.description), add_help=False)
        below.choices[name] = command
        for action in command._actions:
            if action.dest == "model" or action.metavar in ("FILE", "FOLDER", "RUN_DIR"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if isinstance(action.metavar, str) and "|" in action.metavar and action.choices is None:
                action.choices = action.metavar.split("|")
            action.help = (action.help or "").replace("`", "'")
