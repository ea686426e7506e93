"""docs/cli.md, made from the parsers themselves: `python -m allspan.launch.cli_reference > docs/cli.md`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from allspan.launch.cli import COMMANDS, command_module
from allspan.launch.commands import bench
from allspan.protos.config.flags import Parser

INTRODUCTION = """# Command line

`python -m allspan.launch.cli_reference > docs/cli.md` makes this page from the code; a test compares the two.

`allspan COMMAND --help` lists a command's flags, `--help GROUP` explains a group, `--help FLAG` one, `--help all`
everything. `--config FILE` reads a TOML, YAML or JSON table of the same names, with hyphens or underscores; flags win.
Where a flag switches something on, the same name after `no-` switches it off. Exit codes: 1 something failed; 2 a flag,
config key, field or model file is refused; 3 a model cannot be found; 130 Ctrl-C; 141 nobody reads standard output
any more (`allspan list | head -1`).
Flags that vLLM, SGLang, llama.cpp or Ollama call otherwise are answered with the name here.
"""


def parsers() -> list[Parser]:
    """Returns the parsers of all commands, `allspan serve` first."""
    names = [name for name in COMMANDS if name != "bench"]
    made = [command_module(name).make_parser() for name in names]
    made += [bench.make_parser(row) for row in bench.BENCHMARKS.values()]
    return [*made, *map(bench.make_other_parser, bench.OTHERS)]


def reference() -> str:
    """The whole page. Flags that several commands share stand under `allspan serve` alone."""
    serve, *others = parsers()
    shared = _flags(serve)
    return "\n".join([INTRODUCTION, _command(serve, {}), *(_command(parser, shared) for parser in others)])


def _command(parser: Parser, elsewhere: dict[str, str]) -> str:
    positionals = "".join(f" {action.metavar}" for action in parser._get_positional_actions())
    lines = [f"## {parser.prog}{positionals}", "", parser.description or ""]
    own = {flag: row for flag, row in _flags(parser).items() if elsewhere.get(flag) != row}
    grouped = {action for group in parser.named_groups.values() for action in group._group_actions}
    lines += _table("", (action for action in parser._actions if action not in grouped), own)
    for name, group in parser.named_groups.items():
        lines += _table(f"{name}: {group.title}", group._group_actions, own)
    if len(own) < len(_flags(parser)):
        lines += [
            "",
            "It takes the flags of [`allspan serve`](#allspan-serve-model) for the cluster that it starts, too.",
        ]
    return "\n".join([*lines, ""])


def _table(title: str, actions: Iterable[argparse.Action], own: dict[str, str]) -> list[str]:
    rows = [own[_name(action)] for action in actions if _name(action) in own]
    heading = [f"### {title}", ""] if title else []
    return ["", *heading, "| flag | means |", "|---|---|", *rows] if rows else []


def _flags(parser: Parser) -> dict[str, str]:
    """Returns each flag's row by name; `--help` and `--config` are left out, because the page describes them once."""
    return {_name(a): _row(a) for a in parser._actions if a.option_strings and a.dest not in ("help", "config")}


def _name(action: argparse.Action) -> str:
    return next((option for option in action.option_strings if option.startswith("--")), action.dest)


def _row(action: argparse.Action) -> str:
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    names = [option for option in action.option_strings if not (is_switch and option.startswith("--no-"))]
    value = f" {action.metavar}" if action.metavar else ""
    text = " ".join(((action.help or "") % {"default": action.default}).split())
    flags = ", ".join(f"`{name}{value}`" for name in names)
    return f"| {_escaped(flags)} | {_escaped(text)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
