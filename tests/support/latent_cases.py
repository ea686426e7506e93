"""Arguments of attention over latents, and what they come to in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.latent_tensors import LatentWeights
from allspan.kernels.reference.attention import QUANTISED
from allspan.kernels.table import op_set
from support.kernel_cases import I8, Meta, ints, poison, randn

F8 = torch.float8_e4m3fn
QUANTISED_PAGES = (I8, F8)
Requests = list[tuple[int, int]]
"""New tokens, and tokens in the cache, of each request."""


def paged_latents(
    width: int, page_size: int, dtype: torch.dtype, lengths: list[int]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """A cache of random rows in shuffled pages, its scales, page_indptr and page_indices; what no request has is NaN,
    or odd where there are no NaNs."""
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(1)).tolist()
    cache = torch.full((len(order), 1, page_size, width), 85 if dtype is I8 else torch.nan).to(dtype)
    scales = poison(len(order), 1, 2, page_size) if dtype in QUANTISED_PAGES else None
    first = 0
    for request, length in enumerate(lengths):
        own = ints(order[first : first + counts[request]])
        tokens = torch.arange(length)
        slots = own[tokens // page_size] * page_size + tokens % page_size
        rows, first = randn(length, 1, width, seed=request), first + counts[request]
        op_set("reference").append_kv(rows, rows, cache, cache, scales, scales, slots)
    return cache, scales, ints([sum(counts[:r]) for r in range(len(counts) + 1)]), ints(order[:-1])


def held_rows(cache: Tensor, scales: Tensor | None) -> Tensor:
    """What pages hold, in float64 [pages, 1, page_size, width]."""
    if scales is None:
        return cache.double()
    zero, scale = scales.double()[..., None].unbind(2)
    return (QUANTISED[cache.dtype].unpack(cache, cache.shape[3]).double() - zero) * scale


def attended_latents(q: Tensor, rows: Tensor, kept: int, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Sums of the first `kept` elements of rows [tokens, width] for queries of latents q [n, heads, width], the last of
    which is the last token, and logarithms to base 2; in float64. Zeros and -inf where no token is seen."""
    scores = torch.einsum("qhd,td->qht", q.double(), rows) * scale
    if is_causal:
        reach = torch.arange(len(rows) - len(q), len(rows), device=rows.device)[:, None]
        hidden = torch.arange(len(rows), device=rows.device) > reach
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("qht,td->qhd", weights, rows[:, :kept]), scores.logsumexp(-1) / math.log(2)


def latent_case(
    heads: int, sizes: tuple[int, int, int, int], page_size: int, dtype: torch.dtype, requests: Requests
) -> list[Any]:
    """Arguments of latent_attention. sizes: of a latent, of a key that does not turn, of what turns, of a value."""
    latent, key, rot, value = sizes
    cache, scales, page_indptr, order = paged_latents(latent + rot, page_size, dtype, [each[1] for each in requests])
    starts = [sum(new for new, _ in requests[:r]) for r in range(len(requests) + 1)]
    lengths = ints([length for _, length in requests])
    meta = Meta(ints(starts), page_indptr, order, lengths, ints([0] * heads), (key + rot) ** -0.5)
    weights = LatentWeights(randn(heads, latent, key, seed=3) / 8, randn(heads, value, latent, seed=4) / latent**0.5)
    n = starts[-1]
    rooms = poison(n, heads, latent + rot), poison(n, heads, latent), poison(n, heads, value)
    return [randn(n, heads, key + rot, seed=5), weights, cache, scales, meta, *rooms]


def latents_expanded(arguments: list[Any]) -> Tensor:
    """Keys and values made of the latents, in float64, and plain attention."""
    q, weights, cache, scales, meta, *_, out = arguments
    k_up, v_up = (each.double() for each in weights)
    latent, found = k_up.shape[1], torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    held = held_rows(cache, scales)
    for request, length in enumerate(meta.kv_lens.tolist()):
        first, last = meta.qo_indptr[request : request + 2].tolist()
        if first == last:
            continue
        pages = meta.page_indices[meta.page_indptr[request] : meta.page_indptr[request + 1]].long()
        rows = held[pages][:, 0].flatten(0, 1)[:length]
        turned = rows[:, None, latent:].expand(-1, len(k_up), -1)
        keys = torch.cat((torch.einsum("tl,hld->thd", rows[:, :latent], k_up), turned), 2)
        values = torch.einsum("tl,hel->the", rows[:, :latent], v_up)
        scores = torch.einsum("qhd,thd->hqt", q[first:last].double(), keys) * meta.scale
        reach = torch.arange(length - (last - first), length, device=out.device)[:, None]
        scores = scores.masked_fill(torch.arange(length, device=out.device)[None] > reach, -torch.inf)
        found[first:last] = torch.einsum("hqt,the->qhe", scores.softmax(-1), values)
    return found


def latents_absorbed(arguments: list[Any]) -> Tensor:
    """`latents_expanded` of many heads and tokens, with a thirtieth of its operations: latents stay as they are."""
    q, weights, cache, scales, meta, *_, out = arguments
    (latent, key), found = weights.k_up.shape[1:], torch.zeros(out.shape, dtype=torch.float64)
    queries = torch.einsum("nhd,hld->nhl", q[..., :key].double(), weights.k_up.double())
    queries, held = torch.cat((queries, q[..., key:].double()), 2), held_rows(cache, scales)
    for request, length in enumerate(meta.kv_lens.tolist()):
        first, last = meta.qo_indptr[request : request + 2].tolist()
        pages = meta.page_indices[meta.page_indptr[request] : meta.page_indptr[request + 1]].long()
        rows = held[pages].flatten(0, 2)[:length]
        sums, _ = attended_latents(queries[first:last], rows, latent, meta.scale, True)
        found[first:last] = torch.einsum("nhl,hel->nhe", sums, weights.v_up.double())
    return found
