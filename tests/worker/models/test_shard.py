"""Split arithmetic for every number of ranks up to eight."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.worker.models.blocks.gated_mlp import GatedMlp
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.layout import check_ranks
from allspan.worker.models.pieces import EP, TP, Axis
from allspan.worker.models.shard import Place, Shard, make_shard, split
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms, NormSpec


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
    columns = Axis(total, group=TP)
    assert [make_shard(rank, size).part(columns) for rank in range(size)] == list(parts)


def test_nine_heads_on_two_ranks_are_five_and_four() -> None:
    block, shards = Gqa(9, 3, 8, None), [make_shard(rank, 2) for rank in range(2)]
    assert [shard.units(block.heads) for shard in shards] == [range(5), range(5, 9)]
    assert [shard.units(block.kv_heads) for shard in shards] == [range(2), range(1, 3)]
    assert [block.on_rank(shard).kv_head_of for shard in shards] == [(0, 0, 0, 1, 1), (0, 1, 1, 1)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1), (8, 8), (14, 2), (32, 4), (9, 1)])
@pytest.mark.parametrize("size", range(1, 9))
def test_every_query_head_finds_its_kv_head(heads: int, kv_heads: int, size: int) -> None:
    block, shards = Gqa(heads, kv_heads, 8, None), [make_shard(rank, size) for rank in range(size)]
    for shard in shards:
        own, kv_head_of = shard.units(block.kv_heads), block.on_rank(shard).kv_head_of
        for head, kv_head in zip(shard.units(block.heads), kv_head_of, strict=True):
            assert own[kv_head] == head // (heads // kv_heads)
        assert set(kv_head_of) == set(range(len(own))), "a KV head that nobody reads"
        assert len(shard.part(block.heads)) == len(shard.units(block.heads)) * 8
    assert joined(shard.part(block.heads) for shard in shards) == list(range(heads * 8))


def test_each_process_group_splits_its_own_axes() -> None:
    shard = Shard(3, 4, {TP: Place(1, 2), EP: Place(1, 2)})
    assert shard.units(Axis(9, group=EP)) == range(5, 9)
    assert shard.part(Axis(4, 16, TP)) == range(32, 64)
    assert shard.part(Axis(5, 2)) == range(10)


def test_more_ranks_than_query_heads_are_refused() -> None:
    norm = NormSpec(1e-5)
    layer = LayerSpec(Gqa(8, 2, 8, None), GatedMlp(101), Norms(norm), Norms(norm))
    spec = ModelSpec("llama", 64, 1003, 64, (layer,), norm)
    check_ranks(spec, 8)
    with pytest.raises(ConfigError, match="ranks 9 is more than the model's 8 query heads"):
        check_ranks(spec, 9)
