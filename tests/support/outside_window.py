"""Attention with a window from outside: a block whose layers are a cache group, and its op in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allspan.kernels.attention_meta import AttentionMeta
from allspan.kernels.ops import KvPages
from allspan.worker.models.blocks.gqa import Gqa

if TYPE_CHECKING:
    from allspan.worker.models.sublayer import Sublayer
    from allspan.worker.program.program import Slot


@dataclass(frozen=True, slots=True)
class Windowed(Gqa):
    """Gqa whose window is computed by an op of its own."""

    def attend(self, sub: Sublayer, qkv: Slot, pages: KvPages[Slot], out: Slot) -> None:
        own = self.on_rank(sub.shard)
        meta: Any = sub.meta("attention", own, lambda context: context.attention(own))
        sub.program.op("window_attention", qkv, pages.k_cache, pages.v_cache, meta, self.window, out)


def window_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, window: int, out: Tensor
) -> None:
    """As the op `attention` on pages of float32; reads no page that is wholly behind the window of all new tokens."""
    size, heads = k_cache.shape[2], len(meta.kv_head_of)
    for request, length in enumerate(meta.kv_lens.tolist()):
        first, stop = meta.qo_indptr[request : request + 2].tolist()
        positions = torch.arange(length - (stop - first), length)
        seen = torch.arange(max(0, int(positions[0]) + 1 - window), length)
        pages = meta.page_indices[meta.page_indptr[request] + seen // size].long()
        keys, values = (cache[pages, :, seen % size][:, meta.kv_head_of.long()] for cache in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", q[first:stop, :heads], keys) * meta.scale
        behind = positions[:, None] - seen[None, :]
        scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
        out[first:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
