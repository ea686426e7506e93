"""A GGUF file's header, read in one pass: the key-value part and where the tensors lie.

The `gguf` package builds an array view for every string of the vocabulary, which takes seconds; a prompt cannot wait
for that. Every count and length is compared with the bytes that are left and with a limit before anything is built of
it. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files import limits
from allspan.protos.model_files.gguf_types import BLOCKS
from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.regular_file import is_there, names_in, open_regular, unreadable
from allspan.protos.model_files.tensor_ranges import check_ranges

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_ALIGNMENT = 32
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_WINDOW = 8 << 20
"""Bytes read at a time."""
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


def names_of(metadata: Mapping[str, Any]) -> list[str]:
    """The names that a file gives its model: in full, and as basename, finetune and size."""
    parts = [metadata.get(f"general.{key}") for key in ("basename", "finetune", "size_label")]
    names = [metadata.get("general.name"), "-".join(str(part) for part in parts if part)]
    return [each for each in names if isinstance(each, str)]


def metadata_part(path: Path) -> bytes:
    """A GGUF file of the key-value part alone, without tensors. Raises as `read_header` does."""
    with open_regular(path) as file:
        end = gguf_header(file, path).metadata_end
        file.seek(0)
        data = file.read(end)
    return data[:8] + bytes(8) + data[16:]  # magic and version, no tensors, the number of keys


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that a model's path means: itself, or the only one in a folder without a config.json."""
    if not path.is_dir():
        return path if is_there(path) and path.suffix != ".json" else None
    if is_there(path / "config.json"):
        return None
    found = [path / name for name in names_in(path) if name.endswith(".gguf")]
    return found[0] if len(found) == 1 else None


def parts_of(path: Path) -> Iterator[Path]:
    """The file, or every part of a split one (NAME-00001-of-00003.gguf). Raises CheckpointError for a missing part."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        yield path
        return
    for number in range(1, int(match[3]) + 1):
        part = path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
        if not is_there(part):
            raise CheckpointError(f"{part}: part {number} of {int(match[3])} is missing")
        yield part


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for a file that is no GGUF, cut short, or says what cannot be."""
    with open_regular(path) as file:
        return gguf_header(file, path)


def gguf_header(file: BinaryIO, path: Path) -> GgufHeader:
    """See `read_header`; `file` is open, at its start."""
    try:
        return _Reader(file, path).header()
    except OSError as error:
        raise unreadable(path, error) from error


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = os.fstat(file.fileno()).st_size
        self._data = b""
        """The beginning of the file, as far as it was needed."""
        self._at = 0

    def header(self) -> GgufHeader:
        magic = self._take(min(4, self._size))
        if magic != _MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file (it begins with {magic!r})")
        version = self._scalar(4)
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path} is GGUF version {version}, supported are {_VERSIONS}")
        num_tensors = self._count("tensors", self._scalar(10), 24, limits.MAX_TENSORS)
        num_values = self._count("metadata keys", self._scalar(10), 13, limits.MAX_GGUF_KEYS)
        metadata = self._metadata(num_values)
        metadata_end = self._at
        tensors = self._tensors(num_tensors, metadata.get("general.alignment", _ALIGNMENT))
        return GgufHeader(metadata, tensors, metadata_end)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string(limits.MAX_GGUF_KEY_BYTES)
            if key in metadata:
                raise CheckpointError(f"{self._path} has the metadata key {shown(key)} twice")
            metadata[key] = self._value(self._scalar(4), key)
        return metadata

    def _tensors(self, count: int, alignment: object) -> tuple[GgufTensor, ...]:
        most = limits.MAX_GGUF_ALIGNMENT
        if type(alignment) is not int or not 1 <= alignment <= most or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self._path} has general.alignment {shown(alignment)}, must be a positive integer, a power of two of "
                f"at most {most}"
            )
        found = [
            (self._string(limits.MAX_TENSOR_NAME), self._dims(), self._scalar(4), self._scalar(10))
            for _ in range(count)
        ]
        start = -(-self._at // alignment) * alignment
        names: set[str] = set()
        ranges = []
        for name, dims, kind, offset in found:
            if name in names:
                raise CheckpointError(f"{self._path}: tensor {shown(name)} is there twice")
            names.add(name)
            if offset % alignment:
                raise CheckpointError(
                    f"{self._path}: tensor {shown(name)} has offset {offset}, must be a multiple of {alignment}"
                )
            ranges.append((start + offset, start + offset + self._num_bytes(name, dims, kind), name))
        check_ranges(str(self._path), ranges, self._size)
        return tuple(GgufTensor(name, kind, dims[::-1], start + offset) for name, dims, kind, offset in found)

    def _num_bytes(self, name: str, dims: tuple[int, ...], kind: int) -> int:
        if kind not in BLOCKS:
            raise CheckpointError(f"{self._path}: tensor {shown(name)} has the unknown type {kind}")
        block, block_bytes = BLOCKS[kind]
        entries = 1
        for size in dims:
            if not 1 <= size <= limits.MAX_TENSOR_SIZE:
                raise CheckpointError(
                    f"{self._path}: tensor {shown(name)} has shape {list(dims[::-1])}, sizes must be from 1 to "
                    f"{limits.MAX_TENSOR_SIZE}"
                )
            entries *= size
        if not dims or dims[0] % block:
            raise CheckpointError(
                f"{self._path}: tensor {shown(name)} has shape {list(dims[::-1])}, rows of type {kind} must be "
                f"multiples of {block}"
            )
        return entries // block * block_bytes

    def _dims(self) -> tuple[int, ...]:
        count = self._count("dimensions of a tensor", self._scalar(4), 8, limits.MAX_GGUF_DIMS)
        return tuple(self._scalar(10) for _ in range(count))

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(limits.MAX_GGUF_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(self._scalar(4), self._scalar(10), key)
        return self._scalar(kind)

    def _array(self, kind: int, count: int, key: str) -> list[Any]:
        what = f"entries of {shown(key)}"
        if kind == _STRING:
            return self._strings(self._count(what, count, 8, limits.MAX_VOCABULARY))
        dtype = self._dtype(kind)
        self._count(what, count, dtype.itemsize, limits.MAX_VOCABULARY)
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _count(self, what: str, count: int, least_bytes: int, most: int) -> int:
        """The count, if the bytes that are left can hold as many, each of `least_bytes` or more."""
        if count > most:
            raise CheckpointError(f"{self._path}: {count} {what}, must be at most {most}")
        if count * least_bytes > self._size - self._at:
            raise CheckpointError(
                f"{self._path} is cut short: {count} {what} take {count * least_bytes} bytes or more, "
                f"{self._size - self._at} are left"
            )
        return count

    def _strings(self, count: int) -> list[str]:
        at, most, length_of = self._at, limits.MAX_GGUF_STRING_BYTES, struct.Struct("<Q").unpack_from
        data, have = self._data, len(self._data)
        values = []
        for _ in range(count):
            start = at + 8
            if start > have:
                data, have = self._read_to(start)
            size = length_of(data, at)[0]
            if size > most:
                raise self._too_long(size, most)
            at = start + size
            if at > have:
                data, have = self._read_to(at)
            values.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return values

    def _string(self, most: int) -> str:
        size = self._scalar(10)
        if size > most:
            raise self._too_long(size, most)
        return self._take(size).decode("utf-8", "replace")

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
            self._read_to(end)
        taken, self._at = self._data[self._at : end], end
        return taken

    def _read_to(self, end: int) -> tuple[bytes, int]:
        """Reads on, so that byte `end` - 1 is there."""
        if end > self._size:
            raise self._cut()
        if end > limits.MAX_GGUF_HEADER_BYTES:
            raise CheckpointError(
                f"{self._path}: the header takes more than {limits.MAX_GGUF_HEADER_BYTES} bytes, which is the limit"
            )
        more = self._file.read(max(end - len(self._data), len(self._data), _WINDOW))
        self._data += more
        if end > len(self._data):
            raise self._cut()  # by another process, while it is read
        return self._data, len(self._data)

    def _too_long(self, size: int, most: int) -> CheckpointError:
        if size > self._size - self._at:
            return self._cut()
        return CheckpointError(f"{self._path}: a text of {size} bytes at byte {self._at}, must have at most {most}")

    def _cut(self) -> CheckpointError:
        return CheckpointError(f"{self._path} is cut short: its metadata does not end within {self._size} bytes")
