"""docs/troubleshooting.md is keyed by what is printed: the words of every heading stand in the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("client", "kernels", "launch", "protos", "worker")


def _joined(source: str) -> str:
    """Texts that a program writes over several lines, as one."""
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_every_line_that_is_explained_is_printed_somewhere() -> None:
    code = "\n".join(_joined(path.read_text()) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    headings = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)
    assert len(headings) >= 20
    parts = {part.strip() for heading in headings for part in heading.split("…") if len(part.strip()) > 3}
    assert {part for part in parts if part not in code} == set()
