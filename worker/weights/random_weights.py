"""Random weights for shapes whose checkpoint cannot be had: cheap to make, the same model on any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

_POOL = 1 << 22
_STRIDE = 7919
_SCALE = 0.02


class RandomWeights:
    """See `allspan.worker.weights.checkpoint.Checkpoint`. Every element depends on its tensor's name and place only.

    Row r of a tensor is a window of one pool of normal random numbers that starts at (hash of the name + 7919 · r):
    making it takes as long as copying. Vectors named "…norm.weight" are ones.
    """

    naming = "hugging_face"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        widest = max(shape[-1] for shape in self._shapes.values())
        generator = torch.Generator().manual_seed(0)
        pool = torch.randn(_POOL + widest, generator=generator) * _SCALE
        self._pools = {dtype: pool.to(dtype) for dtype in (torch.float32, torch.bfloat16)}

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
        rows, columns = (range(1), ranges[0]) if len(ranges) == 1 else ranges
        target = out.view(1, -1) if out.ndim == 1 else out
        seed = zlib.crc32(name.encode()) % _POOL
        pool = self._pools[out.dtype]
        row = rows.start
        while row < rows.stop:
            start = (seed + row * _STRIDE) % _POOL
            count = min(rows.stop - row, (_POOL - 1 - start) // _STRIDE + 1)
            windows = pool.as_strided((count, len(columns)), (_STRIDE, 1), start + columns.start)
            target[row - rows.start : row - rows.start + count].copy_(windows)
            row += count

    def release(self) -> None:
        pass
