"""GGUF files: the rows that a rank needs, as blocks of their type, or decoded by the `gguf` package."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.limits import CONFIG_SIZES
from allspan.protos.model_files.regular_file import open_regular
from allspan.protos.text.tokenizers.gguf_metadata import GgufTensor, gguf_header, parts_of
from allspan.worker.weights.mapped_file import MappedFile
from allspan.worker.weights.mxfp4_folder import MXFP4, refuse_nan_scales

_PLAIN = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16}
_ONE_ROW = ".ffn_gate_inp_shexp.weight"
"""How names end of matrices of one row, which llama.cpp's converter writes as vectors."""
_CHUNK = 1 << 20
"""Elements decoded at a time: bounds the temporaries and keeps them near the processor."""


@dataclass(frozen=True, slots=True)
class _Stored:
    file: MappedFile
    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    block: int
    block_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block * self.block_bytes

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """See `allspan.worker.weights.checkpoint.Checkpoint`. `metadata` is the header's but for the vocabulary."""

    naming = "gguf"

    def __init__(self, path: Path) -> None:
        """Maps the file (or all parts of a split one) and checks its header; raises CheckpointError."""
        self._path = path
        self._files: list[MappedFile] = []
        self._tensors: dict[str, _Stored] = {}
        self.metadata: dict[str, Any] = {}
        for part in parts_of(path):
            self._open(part)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def where(self, name: str) -> Path:
        stored = self._tensors.get(name)
        return self._path if stored is None else stored.file.path

    def dtype(self) -> str:
        """ "float16" or "bfloat16" when every matrix is stored so, else "float32" (quantised types decode to that)."""
        kinds = {stored.kind for stored in self._tensors.values() if len(stored.shape) > 1}
        if kinds == {gguf.GGMLQuantizationType.BF16}:
            return "bfloat16"
        return "float16" if kinds == {gguf.GGMLQuantizationType.F16} else "float32"

    def read_all(self, name: str) -> list[float]:
        """A small tensor, whole."""
        stored = self._tensors[name]
        most = CONFIG_SIZES["head_dim"]
        if math.prod(stored.shape) > most:
            raise CheckpointError(
                f"{stored.file.path}: tensor {name!r} has shape {list(stored.shape)}, must have at most {most} entries"
            )
        out = torch.empty(stored.shape, dtype=torch.float32)
        self.read(name, [range(size) for size in stored.shape], out)
        values: list[float] = out.flatten().tolist()
        return values

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        if out.numel() == 0:  # a rank beyond the rows or columns there are; not every type decodes nothing
            return
        stored = self._tensors[name]
        rows, columns = _rows_of(stored, ranges)
        target = out.view(len(rows), len(columns))
        step = max(1, _CHUNK // max(1, len(columns)))
        for start in range(0, len(rows), step):
            wanted = range(rows.start + start, min(rows.start + start + step, rows.stop))
            decoded = self._decode(stored, wanted, columns)
            target[start : start + len(wanted)].copy_(torch.from_numpy(decoded))

    def kinds(self) -> dict[str, str]:
        """The type of each tensor ("Q4_K")."""
        return {name: stored.kind.name for name, stored in self._tensors.items()}

    def is_quantised(self) -> bool:
        """Whether a matrix is."""
        return any(stored.kind not in _PLAIN for stored in self._tensors.values() if len(stored.shape) > 1)

    def blocks(self, name: str, rows: range, inputs: range) -> Tensor:
        return torch.from_numpy(self._raw(self._tensors[name], rows, inputs))

    def release(self) -> None:
        for file in self._files:
            file.release()

    def _decode(self, stored: _Stored, rows: range, columns: range) -> npt.NDArray[np.float32]:
        """float32 [rows, columns]; along a row, whole quantisation blocks are decoded and then cut."""
        raw = self._raw(stored, rows, columns)
        decoded = np.asarray(gguf.dequantize(raw, stored.kind), dtype=np.float32).reshape(len(rows), -1)
        start = columns.start % stored.block
        return np.ascontiguousarray(decoded[:, start : start + len(columns)])

    def _raw(self, stored: _Stored, rows: range, columns: range) -> npt.NDArray[np.uint8]:
        """[rows, bytes]: the whole blocks that hold these columns."""
        data = stored.file.view(stored.offset, stored.num_rows * stored.row_bytes).reshape(stored.num_rows, -1)
        first, last = columns.start // stored.block, -(-columns.stop // stored.block)
        taken = slice(first * stored.block_bytes, last * stored.block_bytes)
        raw = np.ascontiguousarray(data[rows.start : rows.stop : rows.step, taken])
        if stored.kind.name == MXFP4:
            scales = torch.from_numpy(raw)[:, :: stored.block_bytes]
            refuse_nan_scales(scales, f"{stored.file.path}: tensor {stored.name!r}", rows, first)
        return raw

    def _open(self, path: Path) -> None:
        with open_regular(path) as opened:
            header = gguf_header(opened, path)
            file = MappedFile(path, opened)
        self._files.append(file)
        if not self.metadata:
            self.metadata = {key: value for key, value in header.metadata.items() if not _is_vocabulary(value)}
        for info in header.tensors:
            if info.name in self._tensors:
                raise CheckpointError(f"{path}: tensor {info.name!r} is there twice")
            self._tensors[info.name] = _locate(file, info)


def _is_vocabulary(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1024


def _rows_of(stored: _Stored, ranges: Sequence[range]) -> tuple[range, range]:
    """The rows and columns of a slice, of one expert's matrix where there are several."""
    if len(ranges) == 1:
        return range(1), ranges[0]
    if len(ranges) == 2:
        return ranges[0], ranges[1]
    (expert,), rows, columns = ranges
    first = expert * stored.shape[1]
    return range(first + rows.start, first + rows.stop, rows.step), columns


def _locate(file: MappedFile, info: GgufTensor) -> _Stored:
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind not in _PLAIN:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        name = next((kind.name for kind in gguf.GGMLQuantizationType if kind == info.kind), str(info.kind))
        raise CheckpointError(
            f"{file.path}: tensor {info.name!r} has type {name}, which the gguf package cannot decode"
        ) from error
    if not 1 <= len(info.shape) <= 3 or info.shape[-1] % block:
        raise CheckpointError(f"{file.path}: tensor {info.name!r} has shape {list(info.shape)} for type {kind.name}")
    shape = (1, *info.shape) if info.name.endswith(_ONE_ROW) and len(info.shape) == 1 else info.shape
    stored = _Stored(file, info.name, kind, shape, info.offset, block, block_bytes)
    end = info.offset + stored.num_rows * stored.row_bytes
    if end > file.size:
        raise CheckpointError(
            f"{file.path}: truncated: tensor {info.name!r} ends at byte {end}, but the file has {file.size} bytes"
        )
    return stored
