"""GGUF files whose keys and values of latents are two tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.worker.weights.gguf_file import GgufFile

_JOINED, _KEYS, _VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


class LatentGgufFile(GgufFile):
    """A GGUF file that has attn_k_b [heads, latent, key] and attn_v_b [heads, value, latent], as if it had attn_kv_b
    [heads · (key + value), latent]: for each head its rows of keys, then those of values. Raises CheckpointError where
    one of two is missing, or is no such tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        halves = [name for name in super().names() if name.endswith((_KEYS, _VALUES))]
        stems = sorted({name[: -len(_KEYS)] for name in halves})
        self._joined = {stem + _JOINED: (stem + _KEYS, stem + _VALUES) for stem in stems}
        for joined, pair in list(self._joined.items()):
            if joined in super().names():  # all three: the two say nothing new
                del self._joined[joined]
            else:
                self._check(*pair)
        self._names = (set(super().names()) - set(halves)) | set(self._joined)

    def _check(self, keys: str, values: str) -> None:
        for one, other in ((keys, values), (values, keys)):
            if one not in super().names():
                raise CheckpointError(f"{self.where(other)}: tensor {one!r} is missing, {other!r} is there")
        shapes = super().shape(keys), super().shape(values)
        if any(len(shape) != 3 for shape in shapes) or shapes[0][:2] != (shapes[1][0], shapes[1][2]):
            raise CheckpointError(
                f"{self.where(keys)}: tensors {keys!r} of shape {list(shapes[0])} and {values!r} of shape "
                f"{list(shapes[1])} must be [heads, latent, key] and [heads, value, latent]"
            )

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._joined:
            return super().shape(name)
        (heads, latent, key), (_, value, _) = map(super().shape, self._joined[name])
        return heads * (key + value), latent

    def where(self, name: str) -> Path:
        return super().where(self._joined[name][0] if name in self._joined else name)

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        if name not in self._joined:
            super().read(name, ranges, out)
            return
        rows, inputs = ranges
        keys, values = self._joined[name]
        (_, latent, key), (_, value, _) = map(super().shape, (keys, values))
        unit = key + value
        first, last = rows.start // unit, -(-rows.stop // unit)
        heads = torch.empty((last - first, unit, latent))
        for head, matrix in zip(range(first, last), heads, strict=True):
            transposed, one = torch.empty((1, latent, key)), range(head, head + 1)
            super().read(keys, [one, range(latent), range(key)], transposed)
            matrix[:key] = transposed[0].T
            super().read(values, [one, range(value), range(latent)], matrix[None, key:])
        start = first * unit
        taken = slice(rows.start - start, rows.stop - start, rows.step)
        out.copy_(heads.flatten(0, 1)[taken, inputs.start : inputs.stop])

    def kinds(self) -> dict[str, str]:
        held = super().kinds()
        joined = {name: held[keys] for name, (keys, _) in self._joined.items()}
        return {name: kind for name, kind in held.items() if name in self._names} | joined
