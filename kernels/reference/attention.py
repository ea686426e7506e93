"""The paged KV cache: writing to it and attention over it, one request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.ops import AttentionMeta


def append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `OpSet.append_kv`."""
    page_size = k_cache.shape[2]
    pages, offsets = slots.long() // page_size, slots.long() % page_size
    k_cache[pages, :, offsets] = k.to(k_cache.dtype)
    v_cache[pages, :, offsets] = v.to(v_cache.dtype)


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, out: Tensor) -> None:
    """See `OpSet.attention`."""
    heads = meta.kv_head_of.long()
    starts, page_starts = meta.qo_indptr.tolist(), meta.page_indptr.tolist()
    for request, kv_len in enumerate(meta.kv_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        pages = meta.page_indices[page_starts[request] : page_starts[request + 1]].long()
        keys = _tokens(k_cache, pages, kv_len)[:, heads]
        values = _tokens(v_cache, pages, kv_len)[:, heads]
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * meta.scale
        reach = torch.arange(kv_len - (last - first), kv_len, device=q.device)[:, None]
        hidden = torch.arange(kv_len, device=q.device)[None, :] > reach
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def _tokens(cache: Tensor, pages: Tensor, kv_len: int) -> Tensor:
    """The first `kv_len` tokens of these pages as float32 [kv_len, Hkv, d]."""
    return cache[pages].float().transpose(1, 2).flatten(0, 1)[:kv_len]
