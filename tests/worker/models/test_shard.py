"""Split arithmetic for every number of ranks up to eight."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.worker.models.shard import make_shard, split
from allspan.worker.models.spec import ModelSpec, RotarySpec
from allspan.worker.weights.weight_map import Dim


def spec_with(heads: int, kv_heads: int) -> ModelSpec:
    return ModelSpec(
        family="llama",
        hidden_size=heads * 8,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        intermediate_size=101,
        vocab_size=1003,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rotary=RotarySpec(theta=1e4),
    )


def joined(parts: Iterable[range]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("total", [8, 9, 14, 101, 1003])
def test_splits_are_contiguous_complete_and_even_with_the_larger_first(total: int, size: int) -> None:
    parts = split(total, size)
    lengths = [len(part) for part in parts]
    assert joined(parts) == list(range(total))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_nine_heads_on_two_ranks_are_five_and_four() -> None:
    first, second = (make_shard(spec_with(9, 3), rank, 2) for rank in range(2))
    assert (first.query_heads, second.query_heads) == (range(5), range(5, 9))
    assert (first.kv_heads, second.kv_heads) == (range(2), range(1, 3))
    assert first.kv_head_of == (0, 0, 0, 1, 1)
    assert second.kv_head_of == (0, 1, 1, 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1), (8, 8), (14, 2), (32, 4), (9, 1)])
@pytest.mark.parametrize("size", range(1, 9))
def test_every_query_head_finds_its_kv_head(heads: int, kv_heads: int, size: int) -> None:
    shards = [make_shard(spec_with(heads, kv_heads), rank, size) for rank in range(size)]
    for shard in shards:
        for head, kv_head in zip(shard.query_heads, shard.kv_head_of, strict=True):
            assert shard.kv_heads[kv_head] == head // (heads // kv_heads)
        assert set(shard.kv_head_of) == set(range(len(shard.kv_heads))), "a KV head that nobody reads"
        assert len(shard.part(Dim.QUERY)) == len(shard.query_heads) * 8
    for dim in (Dim.QUERY, Dim.INTERMEDIATE, Dim.VOCABULARY):
        assert joined(shard.part(dim) for shard in shards) == list(range(shards[0].full(dim)))


def test_more_ranks_than_query_heads_are_refused() -> None:
    make_shard(spec_with(8, 2), 0, 8)
    with pytest.raises(ConfigError, match="ranks 9 is more than the model's 8 query heads"):
        make_shard(spec_with(8, 2), 0, 9)
