"""Attention over latents: one row a token, of which every head makes its keys and values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from allspan.kernels.attention_meta import AttentionMeta
from allspan.kernels.latent_tensors import LatentPages, LatentRooms, LatentWeights, NewLatents
from allspan.kernels.ops import Rotation
from allspan.kernels.reference import elementwise
from allspan.kernels.reference.attention import append_rows, attention, tokens_of


def latent_append(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation[Tensor],
    cache: Tensor,
    scales: Tensor | None,
    slots: Tensor,
) -> None:
    """See `OpSet.latent_append`."""
    turned = rotation.cos_sin.shape[1]
    latent, k_turned = (part.clone() for part in torch.split(kv, [len(weight), turned], 1))
    q_turned = q[..., q.shape[-1] - turned :].clone()
    elementwise.rms_norm(latent, weight, eps, latent)
    elementwise.rotary(q_turned, k_turned[:, None], rotation.positions, rotation.cos_sin)
    q[..., q.shape[-1] - turned :] = q_turned
    if rotation.q_scales is not None:
        q.mul_(rotation.q_scales[rotation.positions.long()][:, None, None])
    torch.cat((latent, k_turned), 1, out=kv)
    append_rows(kv[:, None], cache, scales, slots)


def latent_attention(
    q: Tensor,
    weights: LatentWeights[Tensor],
    cache: Tensor,
    scales: Tensor | None,
    meta: AttentionMeta,
    absorbed: Tensor,
    mixed: Tensor,
    out: Tensor,
) -> None:
    """See `OpSet.latent_attention`: latents stay as they are."""
    width, kept = weights.k_up.shape[1:]
    absorbed[..., :width] = torch.einsum("nhd,hld->nhl", q[..., :kept].float(), weights.k_up.float())
    absorbed[..., width:] = q[..., kept:]
    attention(absorbed, cache, cache, scales, scales, None, meta, mixed)
    out.copy_(torch.einsum("nhl,hel->nhe", mixed.float(), weights.v_up.float()))


def append_and_attend(
    q: Tensor,
    new: NewLatents[Tensor],
    rotation: Rotation[Tensor],
    weights: LatentWeights[Tensor],
    pages: LatentPages[Tensor],
    meta: AttentionMeta,
    rooms: LatentRooms[Tensor],
    out: Tensor,
) -> None:
    """See `FusedOps.append_and_attend`."""
    latent_append(q, new.kv, new.weight, new.eps, rotation, *pages, new.slots)
    latent_attention(q, weights, *pages, meta, *rooms, out)


def log_sums(queries: Tensor, cache: Tensor, scales: Tensor | None, meta: AttentionMeta) -> Tensor:
    """Returns float32 [n, Hq]: logarithms to base 2 of the sums of the powers of e that the queries of latents [n, Hq,
    L + rot] of `latent_attention` divide by; -inf where a query sees no token."""
    found = queries.new_empty(queries.shape[:2], dtype=torch.float32)
    starts, page_starts = meta.qo_indptr.tolist(), meta.page_indptr.tolist()
    for request, kv_len in enumerate(meta.kv_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        pages = meta.page_indices[page_starts[request] : page_starts[request + 1]].long()
        keys = tokens_of(cache, scales, pages, kv_len, queries.shape[-1])[:, 0]
        scores = torch.einsum("qhd,kd->qhk", queries[first:last].float(), keys) * meta.scale
        places = torch.arange(kv_len, device=queries.device)
        hidden = places > torch.arange(kv_len - (last - first), kv_len, device=queries.device)[:, None]
        found[first:last] = scores.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1) / math.log(2)
    return found
