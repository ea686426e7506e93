"""Which part of a model one rank holds. Splits are contiguous and as even as they go; the first ranks get one more."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from allspan.protos.api.errors import ConfigError
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import Dim


def split(total: int, size: int) -> tuple[range, ...]:
    """`total` items over `size` ranks: 9 over 2 is 0..5 and 5..9."""
    each, more = divmod(total, size)
    starts = [rank * each + min(rank, more) for rank in range(size + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part. Ranges count heads, MLP columns and vocabulary rows of the whole model."""

    spec: ModelSpec
    rank: int
    size: int
    query_heads: range
    kv_heads: range
    """Every KV head that this rank's query heads read; neighbouring ranks may hold the same one."""
    kv_head_of: tuple[int, ...]
    """For each query head of this rank, the index of its KV head within `kv_heads`."""
    intermediate: range
    vocabulary: range

    def full(self, dim: Dim) -> int:
        """Elements along a dimension in the whole model."""
        spec = self.spec
        return {
            Dim.HIDDEN: spec.hidden_size,
            Dim.QUERY: spec.num_heads * spec.head_dim,
            Dim.KEY_VALUE: spec.num_kv_heads * spec.head_dim,
            Dim.HEAD: spec.head_dim,
            Dim.INTERMEDIATE: spec.intermediate_size,
            Dim.VOCABULARY: spec.vocab_size,
        }[dim]

    def part(self, dim: Dim) -> range:
        """This rank's elements along a dimension."""
        if dim is Dim.QUERY:
            return self._elements(self.query_heads)
        if dim is Dim.KEY_VALUE:
            return self._elements(self.kv_heads)
        if dim is Dim.INTERMEDIATE:
            return self.intermediate
        if dim is Dim.VOCABULARY:
            return self.vocabulary
        return range(self.full(dim))

    def _elements(self, heads: range) -> range:
        return range(heads.start * self.spec.head_dim, heads.stop * self.spec.head_dim)


def make_shard(spec: ModelSpec, rank: int, size: int) -> Shard:
    """Raises ConfigError for more ranks than query heads: a rank without heads would only wait for the others."""
    if size > spec.num_heads:
        raise ConfigError(
            f"ranks {size} is more than the model's {spec.num_heads} query heads: use at most {spec.num_heads} ranks"
        )
    group = spec.num_heads // spec.num_kv_heads
    query_heads = split(spec.num_heads, size)[rank]
    kv_heads = range(query_heads[0] // group, query_heads[-1] // group + 1)
    return Shard(
        spec=spec,
        rank=rank,
        size=size,
        query_heads=query_heads,
        kv_heads=kv_heads,
        kv_head_of=tuple(head // group - kv_heads.start for head in query_heads),
        intermediate=split(spec.intermediate_size, size)[rank],
        vocabulary=split(spec.vocab_size, size)[rank],
    )
