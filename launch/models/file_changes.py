"""What became of a model's weights on the disk while ranks had them mapped."""

from __future__ import annotations

import os
from pathlib import Path

_SUFFIXES = (".safetensors", ".bin", ".gguf")
_WAY_OUT = "put it back; to replace a model in use, write another file and rename it"


class FileChanges:
    """Knows the lengths and times that the weights had when it was made."""

    def __init__(self, model: Path) -> None:
        self._before = {path: found for path in _weights(model) if (found := _state(path)) is not None}

    def first(self) -> str:
        """The first file that has changed since, in words; "" when none has."""
        for path, before in self._before.items():
            now = _state(path)
            if now is None:
                return f"{path} is gone: {_WAY_OUT}"
            if now[0] < before[0]:
                return f"{path} was cut from {before[0]} to {now[0]} bytes while it was in use: {_WAY_OUT}"
            if now != before:
                return f"{path} was written to while it was in use: {_WAY_OUT}"
        return ""


def _weights(model: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(model)) if model.is_dir() else []
    except OSError:
        return []
    return [model / name for name in names if name.endswith(_SUFFIXES)] if names else [model]


def _state(path: Path) -> tuple[int, int] | None:
    """Length and time of the last change; None where there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
