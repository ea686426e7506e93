"""The tables of docs/chat.md say what the parsers do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

from allspan.client.gateway.chat.formats import FORMATS
from allspan.client.gateway.chat.thinking import TAGS
from allspan.client.gateway.config import ChatConfig

DOC = (Path(__file__).resolve().parents[4] / "docs" / "chat.md").read_text()


def table(title: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this title, by their first word."""
    rows = DOC.partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return {re.findall(r"`(\w+)`", row[0])[0]: row[1:] for row in cells}


def test_tool_call_parsers_are_as_the_table_says() -> None:
    rows = table("parser")
    assert set(rows) == set(FORMATS) == set(get_args(get_type_hints(ChatConfig)["tool_call_parser"])) - {"auto"}
    for name, form in FORMATS.items():
        marks, arguments, taken = rows[name]
        assert arguments == f"`{form.arguments}`"
        own = {mark for region in form.regions for mark in (region.open, region.close) if mark and "```" not in mark}
        named = set(re.findall(r"`([^`]+)`", marks)) - {"json"}
        assert (
            named == (own - {row for row in own if row in _marks("hermes", "llama3_json", "mistral")}) or named == own
        )
        assert ("none" in marks) is any(not region.open for region in form.regions)
        assert taken


def _marks(*names: str) -> set[str]:
    return {mark for name in names for region in FORMATS[name].regions for mark in (region.open, region.close)}


def test_reasoning_parsers_are_as_the_table_says() -> None:
    rows = table("`--reasoning-parser`")
    assert set(rows) == set(get_args(get_type_hints(ChatConfig)["reasoning_parser"]))
    for name, tags in TAGS.items():
        named = re.findall(r"`([^`]+)`", rows[name][0])
        assert set(named) & {opening for opening, _ in tags.pairs} == {opening for opening, _ in tags.pairs}
        assert ("from the first token" in rows[name][1]) is tags.from_start
