"""A GGUF file's header, read in one pass: the key-value part and where the tensors lie.

The `gguf` package builds an array view for every string of the vocabulary, which takes seconds; a prompt cannot wait
for that. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allspan.protos.api.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_ALIGNMENT = 32
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`kind` is a ggml type; `shape` is [out, in] (the file itself has it the other way round)."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    """The offset in bytes, from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Keys to Python values, arrays as lists; and the tensors. `metadata_end` is the byte behind the keys."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    metadata_end: int


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value part alone; raises as `read_header` does."""
    return read_header(path).metadata


def metadata_part(path: Path) -> bytes:
    """A GGUF file of the key-value part alone, without tensors. Raises as `read_header` does."""
    end = read_header(path).metadata_end
    with path.open("rb") as file:
        data = file.read(end)
    return data[:8] + bytes(8) + data[16:]  # magic and version, no tensors, the number of keys


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that a model's path means: itself, or the only one in a folder without a config.json."""
    if path.is_file():
        return path
    found = [] if (path / "config.json").exists() else list(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for a file that is no GGUF, or cut short within its header."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise CheckpointError(f"{path} is no GGUF file (it begins with {data[:4]!r})")
            return _Reader(data, path).header()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 4

    def header(self) -> GgufHeader:
        version = self._scalar(4)
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path} is GGUF version {version}, supported are {_VERSIONS}")
        num_tensors, num_values = self._scalar(10), self._scalar(10)
        metadata = {self._string(): self._value(self._scalar(4)) for _ in range(num_values)}
        metadata_end = self._at
        found = [(self._string(), self._dims(), self._scalar(4), self._scalar(10)) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path} has general.alignment {alignment!r}, must be a positive integer")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(GgufTensor(name, kind, dims[::-1], start + offset) for name, dims, kind, offset in found)
        return GgufHeader(metadata, tensors, metadata_end)

    def _dims(self) -> tuple[int, ...]:
        return tuple(self._scalar(10) for _ in range(self._scalar(4)))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar(4), self._scalar(10))
        return self._scalar(kind)

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
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
        value = np.frombuffer(self._take(dtype.itemsize), dtype)[0]
        # The shortest decimal that is this float32: 1e-05, as the original config has it, not 9.999999747378752e-06.
        return float(str(value)) if kind == _FLOAT32 else value.item()

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
