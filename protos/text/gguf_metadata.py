"""A GGUF file's key-value part, read in one pass.

The `gguf` package builds an array view for every string of the vocabulary, which takes seconds; a prompt cannot wait
for that. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from allspan.protos.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}


def read_metadata(path: Path) -> dict[str, Any]:
    """Keys to Python values; arrays are lists. Raises CheckpointError for a file that is no GGUF, or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise CheckpointError(f"{path} is no GGUF file (it begins with {data[:4]!r})")
            return _Reader(data, path).metadata()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 4

    def metadata(self) -> dict[str, Any]:
        version = self._scalar(4)
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path} is GGUF version {version}, supported are {_VERSIONS}")
        self._scalar(10)  # the number of tensors
        return {self._string(): self._value(self._scalar(4)) for _ in range(self._scalar(10))}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar(4), self._scalar(10))
        return self._scalar(kind)

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in (_STRING, _ARRAY):
            if count > len(self._data) - self._at:
                raise self._cut()
            return self._strings(count) if kind == _STRING else [self._value(kind) for _ in range(count)]
        dtype = self._dtype(kind)
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        data, at, length_of = self._data, self._at, struct.Struct("<Q").unpack_from
        values = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_of(data, at)[0]
                values.append(data[start:at].decode("utf-8", "replace"))
        except (struct.error, OverflowError) as error:
            raise self._cut() from error
        if at > len(data):
            raise self._cut()
        self._at = at
        return values

    def _string(self) -> str:
        return self._take(self._scalar(10)).decode("utf-8", "replace")

    def _scalar(self, kind: int) -> Any:
        dtype = self._dtype(kind)
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _dtype(self, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path} has a metadata value of unknown type {kind} at byte {self._at}")
        return np.dtype(_SCALARS[kind]).newbyteorder("<")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._cut()
        taken, self._at = self._data[self._at : end], end
        return taken

    def _cut(self) -> CheckpointError:
        return CheckpointError(f"{self._path} is cut short: its metadata does not end within {len(self._data)} bytes")
