"""GGUF files whose keys and values of latents are two tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.worker.weights.gguf_file import GgufFile

_JOINED, _KEYS, _VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


@dataclass(frozen=True, slots=True)
class _Sizes:
    heads: int
    latent: int
    key: int
    value: int


class LatentGgufFile(GgufFile):
    """A GGUF file that has attn_k_b [heads, latent, key] and attn_v_b [heads, value, latent], or both in two
    dimensions (of ik_llama.cpp), the heads' rows below each other, as if it had attn_kv_b [heads · (key + value),
    latent]: for each head its rows of keys, then those of values. Raises CheckpointError where one of two is missing,
    or is no such tensor."""

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
        if self._sizes(keys, values) is None:
            raise CheckpointError(
                f"{self.where(keys)}: tensors {keys!r} of shape {list(super().shape(keys))} and {values!r} of shape "
                f"{list(super().shape(values))} must be [heads, latent, key] and [heads, value, latent], or "
                "[heads · latent, key] and [heads · value, latent]"
            )

    def _sizes(self, keys: str, values: str) -> _Sizes | None:
        """None where the shapes do not go together."""
        one, other = super().shape(keys), super().shape(values)
        if len(one) == len(other) == 3:
            sizes = _Sizes(one[0], *one[1:], other[1])
            return sizes if other[::2] == one[:2] else None
        if len(one) != 2 or len(other) != 2:
            return None
        heads = one[0] // max(1, other[1])
        sizes = _Sizes(heads, other[1], one[1], other[0] // max(1, heads))
        return sizes if (heads * sizes.latent, heads * sizes.value) == (one[0], other[0]) else None

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._joined:
            return super().shape(name)
        sizes = self._sizes(*self._joined[name])
        assert sizes is not None  # they were checked
        return sizes.heads * (sizes.key + sizes.value), sizes.latent

    def where(self, name: str) -> Path:
        return super().where(self._joined[name][0] if name in self._joined else name)

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        if name not in self._joined:
            super().read(name, ranges, out)
            return
        rows, inputs = ranges
        keys, values = self._joined[name]
        sizes = self._sizes(keys, values)
        assert sizes is not None  # they were checked
        latent, key, value = sizes.latent, sizes.key, sizes.value
        unit, is_flat = key + value, len(super().shape(keys)) == 2
        first, last = rows.start // unit, -(-rows.stop // unit)
        heads = torch.empty((last - first, unit, latent))
        for head, matrix in zip(range(first, last), heads, strict=True):
            transposed = torch.empty((latent, key))
            for held, count, into in ((keys, latent, transposed), (values, value, matrix[key:])):
                own = [range(head * count, (head + 1) * count)] if is_flat else [range(head, head + 1), range(count)]
                super().read(held, [*own, range(into.shape[1])], into)
            matrix[:key] = transposed.T
        start = first * unit
        taken = slice(rows.start - start, rows.stop - start, rows.step)
        out.copy_(heads.flatten(0, 1)[taken, inputs.start : inputs.stop])

    def kinds(self) -> dict[str, str]:
        held = super().kinds()
        joined = {name: held[keys] for name, (keys, _) in self._joined.items()}
        return {name: kind for name, kind in held.items() if name in self._names} | joined
