"""A hook of mkdocs that replaces links to files outside of docs/ by their paths: the site does not hold those files."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text with `[text](../path)` written as text and path."""
    return _OUTSIDE.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if path in text else f"{text} (`{path}`)"
