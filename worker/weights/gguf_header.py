"""The header of a GGUF file: its metadata, and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf` package
has a reader too; this one skips the vocabulary's long arrays (seconds a rank) and names what is wrong with a file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from allspan.protos.errors import CheckpointError
from allspan.worker.weights.mapped_file import MappedFile

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_LONGEST_ARRAY = 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`type_id` is a ggml type; `shape` is [out, in] (GGUF itself writes it the other way round)."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata` lacks arrays of more than 1024 items (the vocabulary), which no model needs."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(file: MappedFile) -> GgufHeader:
    """Raises CheckpointError when the file is not GGUF, or ends within the header."""
    try:
        return _read(_Cursor(file), file)
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
        message = f"{file.path}: truncated or damaged within the GGUF header (the file has {file.size} bytes)"
        raise CheckpointError(message) from error


def _read(cursor: _Cursor, file: MappedFile) -> GgufHeader:
    if file.map[:4] != b"GGUF":
        raise CheckpointError(f"{file.path}: not a GGUF file: it starts with {file.map[:4]!r}")
    cursor.position = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{file.path}: GGUF version {version} is not supported (supported: 2, 3, little-endian)")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name = cursor.text()
        dims = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))
        found.append((name, dims[::-1], cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(TensorInfo(name, kind, shape, start + offset) for name, shape, kind, offset in found)
    return GgufHeader({key: value for key, value in metadata.items() if value is not None}, tensors)


class _Cursor:
    """Reads values one after another."""

    def __init__(self, file: MappedFile) -> None:
        self._map = file.map
        self._size = file.size
        self.position = 0

    def scalar(self, form: str) -> Any:
        value = struct.unpack_from(form, self._map, self.position)[0]
        self.position += struct.calcsize(form)
        return value

    def text(self) -> str:
        return self._bytes(self.scalar("<Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """None for a long array, which is skipped."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.scalar("<I"), self.scalar("<Q"))
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        value = self.scalar(_SCALARS[kind])
        # The shortest decimal that is this float32: 1e-05, as the original config says, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self, kind: int, count: int) -> list[Any] | None:
        if count <= _LONGEST_ARRAY:
            return [self.value(kind) for _ in range(count)]
        if kind in _SCALARS:
            self._bytes(count * struct.calcsize(_SCALARS[kind]))
            return None
        if kind != _STRING:
            raise struct.error(f"long array of type {kind}")
        unpack, position = struct.Struct("<Q").unpack_from, self.position
        for _ in range(count):
            position += 8 + unpack(self._map, position)[0]
        self.position = position
        return None

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self.position:
            raise struct.error("past the end")
        start, self.position = self.position, self.position + count
        return self._map[start : start + count]
