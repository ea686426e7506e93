"""What the documentation names exists: flags of commands, and files of this repository."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from allspan.launch.cli_reference import parsers, reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))


@functools.cache
def flags() -> set[str]:
    return {option for parser in parsers() for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_flags_in_code_spans_exist(doc: Path) -> None:
    named = set(re.findall(r"`(--[a-z][a-z-]*)", doc.read_text()))
    assert named - flags() == set()


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_links_and_paths_lead_somewhere(doc: Path) -> None:
    text = doc.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`((?:protos|kernels|worker|client|launch|public|tests)/[\w./-]*)`", text)
    missing = [link for link in links if not (doc.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_page_of_flags_is_up_to_date() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "python -m allspan.launch.cli_reference > docs/cli.md"
