"""Random weights for shapes whose checkpoint cannot be had: cheap to make, the same model on any number of ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_POOL = 1 << 22
_STRIDE = 7919
_SCALE = 0.02
_BLOCKS = 1 << 14
_SCALES = {
    "Q8_0": (0, _SCALE / 74, 0.0),
    "Q4_0": (0, _SCALE / 4.6, 0.0),
    "Q4_1": (0, _SCALE / 4.6, _SCALE / 4.6 * -7.5),
    "Q5_0": (0, _SCALE / 9.2, 0.0),
    "Q5_1": (0, _SCALE / 9.2, _SCALE / 9.2 * -15.5),
    "Q4_K": (0, _SCALE / 4.6 / 32, _SCALE / 4.6 / 32 * 7.5),
    "Q5_K": (0, _SCALE / 9.2 / 32, _SCALE / 9.2 / 32 * 15.5),
    "Q6_K": (208, _SCALE / 18.5 / 74, 0.0),
    "Q3_K": (108, _SCALE / 2.3 / 18.5, 0.0),
    "Q2_K": (80, _SCALE / 1.2 / 8.8, _SCALE / 1.2 / 8.8 * 1.5),
    "MXFP4": (0, _SCALE / 5.8, 0.0),
    "IQ4_NL": (0, _SCALE / 69, 0.0),
    "IQ4_XS": (0, _SCALE / 69 / 18.5, 0.0),
    "IQ3_S": (0, _SCALE / 8.2 / 16, 0.0),
    "IQ3_XXS": (0, _SCALE / 34 / 4.6, 0.0),
    "IQ2_S": (0, _SCALE / 24 / 2.3, 0.0),
    "IQ2_XS": (0, _SCALE / 24 / 2.3, 0.0),
    "IQ2_XXS": (0, _SCALE / 24 / 2.3, 0.0),
}
"""GGUF type → where in a block its scale lies, the scale, and the minimum behind it (0: none)."""


class RandomWeights:
    """See `allspan.worker.weights.checkpoint.Checkpoint`. Every element depends on its tensor's name and place only.

    Row r of a tensor is a window of one pool of normal random numbers that starts at (hash of the name + 7919 · r):
    making it takes as long as copying. Vectors named "…norm.weight" are ones.
    """

    naming = "hugging_face"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str] | None = None) -> None:
        """`kinds`: the GGUF types that tensors are to have."""
        self._shapes = dict(shapes)
        self._kinds = dict(kinds or {})
        widest = max(shape[-1] for shape in self._shapes.values())
        generator = torch.Generator().manual_seed(0)
        pool = torch.randn(_POOL + widest, generator=generator) * _SCALE
        self._blocks: dict[str, npt.NDArray[np.uint8]] = {}
        self._pools = {dtype: pool.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def where(self, name: str) -> Path:
        return Path("random weights")

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        if name.endswith("norm.weight"):
            out.fill_(1.0)
            return
        if len(ranges) == 1:
            rows, columns = range(1), ranges[0]
        else:  # of the matrices of experts, those rows are counted through all of them
            above = 0 if len(ranges) == 2 else ranges[0].start * self._shapes[name][1]
            rows, columns = range(above + ranges[-2].start, above + ranges[-2].stop), ranges[-1]
        target = out.view(len(rows), len(columns))
        seed = zlib.crc32(name.encode()) % _POOL
        pool = self._pools[out.dtype]
        row = rows.start
        while row < rows.stop:
            start = (seed + row * _STRIDE) % _POOL
            count = min(rows.stop - row, (_POOL - 1 - start) // _STRIDE + 1)
            windows = pool.as_strided((count, len(columns)), (_STRIDE, columns.step), start + columns.start)
            target[row - rows.start : row - rows.start + count].copy_(windows)
            row += count

    def blocks(self, name: str, rows: range, inputs: range) -> Tensor:
        """See `allspan.worker.weights.checkpoint.BlockCheckpoint`: random codes, with one scale."""
        kind = gguf.GGMLQuantizationType[self._kinds[name]]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in self._blocks:
            self._blocks[kind.name] = _random_blocks(kind.name, size)
        pool = self._blocks[kind.name]
        first, last = inputs.start // elements, -(-inputs.stop // elements)
        starts = zlib.crc32(name.encode()) + first + _STRIDE * np.arange(rows.start, rows.stop, rows.step)
        windows = np.lib.stride_tricks.as_strided(pool, (_BLOCKS, (last - first) * size), (size, 1), writeable=False)
        return torch.from_numpy(windows[starts % _BLOCKS])

    def release(self) -> None:
        pass


def _random_blocks(kind: str, size: int) -> npt.NDArray[np.uint8]:
    """uint8 [2 · `_BLOCKS`, size] of weights with the deviation `_SCALE` and a mean near 0; the second half is the
    first again, so that as many blocks lie behind each of the first half."""
    pool = np.random.default_rng(0).integers(0, 256, (_BLOCKS, size), dtype=np.uint8)
    place, scale, least = _SCALES[kind]
    if kind == "MXFP4":  # a scale is a power of two, of which a byte is the exponent
        pool[:, place] = round(math.log2(scale)) + 128
        return np.concatenate((pool, pool))
    halves = np.array([scale, least], dtype="<f2").view(np.uint8)
    pool[:, place : place + 2] = halves[:2]
    if least:
        pool[:, place + 2 : place + 4] = halves[2:]
    return np.concatenate((pool, pool))
