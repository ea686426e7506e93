"""Hugging Face folders: one safetensors file, or several with an index.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the data. Read here directly, so that a damaged file is named precisely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.worker.weights.mapped_file import MappedFile

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_DTYPES = _FLOATS | _CODES
_CHUNK = 1 << 25
"""Bytes copied before the pages of the file are given back: bounds what loading takes beside the weights themselves."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Stored:
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFolder:
    """See `allspan.worker.weights.checkpoint.Checkpoint`."""

    naming = "hugging_face"

    def __init__(self, folder: Path) -> None:
        """Maps every file and checks its header; raises CheckpointError naming the file and the tensor."""
        self._folder = folder
        self._files: list[MappedFile] = []
        self._tensors: dict[str, Stored] = {}
        index = folder / _INDEX
        if index.is_file():
            self._open_sharded(index)
            return
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: no *.safetensors file (other formats, such as pickles, are not read)")
        for path in files:
            self._open(path)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def where(self, name: str) -> Path:
        stored = self._tensors.get(name)
        return self._folder if stored is None else stored.file.path

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        wanted = self._view(name, _FLOATS)[tuple(slice(part.start, part.stop) for part in ranges)]
        step = max(1, _CHUNK * len(wanted) // max(1, wanted.nbytes))
        for source, target in zip(torch.split(wanted, step), torch.split(out, step), strict=True):
            target.copy_(source)
            self._tensors[name].file.release()

    def dtype(self, name: str) -> str:
        """Returns a tensor's dtype as the file names it ("BF16")."""
        return self._tensors[name].dtype

    def view(self, name: str) -> Tensor:
        """The whole tensor where it lies, not to be written: nothing is read before it is used."""
        return self._view(name, _DTYPES)

    def release(self) -> None:
        for file in self._files:
            file.release()

    def _view(self, name: str, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        stored = self._tensors[name]
        dtype = dtypes.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{stored.file.path}: tensor {name!r} has dtype {stored.dtype}, which is not supported "
                f"(supported: {', '.join(dtypes)})"
            )
        raw = torch.from_numpy(stored.file.view(stored.offset, stored.num_bytes))
        if stored.offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(stored.shape)

    def _open_sharded(self, index: Path) -> None:
        weight_map = _read_index(index)
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            path = self._folder / shard
            if not path.is_file():
                first = next(name for name, file in weight_map.items() if file == shard)
                raise CheckpointError(f"{path}: shard is missing ({index.name} expects tensor {first!r} in it)")
            self._open(path)
        for name, shard in weight_map.items():
            if name not in self._tensors:
                path = self._folder / shard
                raise CheckpointError(f"{path}: tensor {name!r} is missing ({index.name} expects it here)")

    def _open(self, path: Path) -> None:
        file = MappedFile(path)
        self._files.append(file)
        header, start = read_header(file)
        available = file.size - start
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            stored = read_entry(file, name, entry, start)
            end = stored.offset + stored.num_bytes - start
            if end > available:
                raise CheckpointError(
                    f"{path}: truncated: tensor {name!r} ends at byte {start + end}, but the file has {file.size} bytes"
                )
            self._tensors[name] = stored


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(Path(file).name == file for file in weight_map.values()):
            return dict(weight_map)
        raise ValueError("a shard lies outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index: {error!r}") from error


def read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The header and where the data starts."""
    if file.map[:7] == b"version":
        raise CheckpointError(f"{file.path}: is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    if file.size < 8:
        raise CheckpointError(f"{file.path}: truncated: {file.size} bytes, expected at least 8")
    length = int.from_bytes(file.map[:8], "little")
    if length > file.size - 8:
        raise CheckpointError(
            f"{file.path}: truncated or not safetensors: the header takes {length} bytes, the file has {file.size}"
        )
    try:
        header = json.loads(file.map[8 : 8 + length])
    except ValueError as error:
        raise CheckpointError(f"{file.path}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: the safetensors header is not a JSON object")
    return header, 8 + length


def read_entry(file: MappedFile, name: str, entry: Any, start: int) -> Stored:
    try:
        begin, end = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(size) for size in entry["shape"])
        dtype = str(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file.path}: tensor {name!r} has a malformed header entry: {error!r}") from error
    known = _DTYPES.get(dtype)
    if begin < 0 or end < begin or (known is not None and math.prod(shape) * known.itemsize != end - begin):
        raise CheckpointError(
            f"{file.path}: tensor {name!r} ({dtype} {list(shape)}) does not fit its data, bytes {begin} to {end}"
        )
    return Stored(file, dtype, shape, start + begin, end - begin)
