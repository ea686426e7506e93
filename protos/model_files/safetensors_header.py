"""The header of a safetensors file, checked: names, types, shapes and where the data of each tensor lies.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the data, without holes. Read here directly, so that a damaged file is
named precisely.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import parse_object, shown
from allspan.protos.model_files.limits import (
    MAX_TENSOR_DIMS,
    MAX_TENSOR_NAME,
    MAX_TENSOR_SIZE,
    MAX_TENSORS,
    MAX_TENSORS_HEADER_BYTES,
)
from allspan.protos.model_files.regular_file import open_regular
from allspan.protos.model_files.tensor_ranges import check_ranges

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""The bits of an entry of each dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`offset` and `num_bytes` of the data, from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """`raw`: all bytes before the data."""

    tensors: Mapping[str, StoredTensor]
    raw: bytes


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Raises CheckpointError naming the file, the tensor and what is wrong."""
    with open_regular(path) as file:
        return safetensors_header(file, path)


def safetensors_header(file: BinaryIO, path: Path) -> SafetensorsHeader:
    """See `read_safetensors_header`; `file` is open, at its start."""
    file_bytes = os.fstat(file.fileno()).st_size
    start = file.read(8)
    if start == b"version ":
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    if file_bytes < 8 or len(start) < 8:
        raise CheckpointError(f"{path}: truncated: {file_bytes} bytes, expected at least 8")
    length = int.from_bytes(start, "little")
    if length > file_bytes - 8:
        raise CheckpointError(
            f"{path}: truncated or not safetensors: the header takes {length} bytes, the file has {file_bytes}"
        )
    if length > MAX_TENSORS_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the safetensors header takes {length} bytes, must be at most {MAX_TENSORS_HEADER_BYTES}: split "
            "the file into shards"
        )
    text = file.read(length)
    values = parse_object(text, f"{path}: the safetensors header")
    values.pop("__metadata__", None)
    if len(values) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(values)} tensors, must be at most {MAX_TENSORS}")
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in values.items()}
    ranges = [(each.offset, each.offset + each.num_bytes, name) for name, each in tensors.items()]
    check_ranges(str(path), ranges, file_bytes)
    held = sum(each.num_bytes for each in tensors.values())
    if held != file_bytes - 8 - length:
        raise CheckpointError(
            f"{path}: altered: it has {file_bytes} bytes, the tensors and the header take {8 + length + held}: fetch "
            "it again"
        )
    return SafetensorsHeader(tensors, start + text)


def _tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """`start`: of the data."""
    malformed = f"{path}: tensor {shown(name)} has a malformed header entry"
    if len(name) > MAX_TENSOR_NAME or not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape"}:
        raise CheckpointError(
            f"{malformed}: it must be an object with dtype, shape and data_offsets, under a name of at most "
            f"{MAX_TENSOR_NAME} characters"
        )
    dtype, shape = entry["dtype"], entry["shape"]
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{malformed}: dtype {shown(dtype)}, must be one of {', '.join(BITS)}")
    if not _whole(shape) or len(shape) > MAX_TENSOR_DIMS or any(size > MAX_TENSOR_SIZE for size in shape):
        raise CheckpointError(
            f"{malformed}: shape {shown(shape)}, must be at most {MAX_TENSOR_DIMS} integers from 0 to {MAX_TENSOR_SIZE}"
        )
    if not _whole(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{malformed}: data_offsets {shown(offsets)}, must be two integers of at least 0")
    begin, end = offsets
    if end < begin or math.prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise CheckpointError(
            f"{path}: tensor {shown(name)} ({dtype} {shape}) does not fit its data, bytes {begin} to {end}"
        )
    return StoredTensor(dtype, tuple(shape), start + begin, end - begin)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
