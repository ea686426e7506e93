"""What each head of a rank counts for in means over the heads of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from allspan.worker.models.pieces import ATTENTION, Axis
from allspan.worker.models.shard import Place, Shard


def head_shares(shard: Shard, heads: Axis, kv_heads: Axis) -> Tensor:
    """float32 [2, heads of queries, keys and values]: see `OpSet.mean_squares`. A KV head that several ranks hold
    counts on each of them for its part, so that the ranks' sums are means."""
    size = shard.groups[ATTENTION].size
    others = [replace(shard, groups={**shard.groups, ATTENTION: Place(rank, size)}) for rank in range(size)]
    held = [head for other in others for head in other.units(kv_heads)]
    own, own_kv = shard.units(heads), shard.units(kv_heads)
    shares = torch.zeros(2, len(own) + 2 * len(own_kv))
    shares[0, : len(own)] = 1 / heads.size
    for place, head in enumerate(own_kv):
        shares[1, len(own) + place] = 1 / (kv_heads.size * held.count(head))
    return shares
