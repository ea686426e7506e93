"""The paged KV cache: writing to it and attention over it, one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.kernels.attention_meta import AttentionMeta


@dataclass(frozen=True)
class Quantised:
    """Codes from `low` to `high` in place of elements, `pack`ed into bytes: integers, or else symmetric around 0."""

    low: int
    high: int
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, int], Tensor]
    """(bytes, d) → [.., d]."""
    is_integer: bool = True


def _pack_pairs(n: Tensor) -> Tensor:
    """[.., d] → uint8 [.., ⌈d / 2⌉], the first of two in the low half."""
    even = torch.nn.functional.pad(n, (0, n.shape[-1] % 2)).to(torch.uint8)
    return even[..., ::2] | even[..., 1::2] << 4


def _unpack_pairs(packed: Tensor, size: int) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :size]


QUANTISED = {
    torch.int8: Quantised(-128, 127, lambda n: n.to(torch.int8), lambda n, size: n),
    torch.uint8: Quantised(0, 15, _pack_pairs, _unpack_pairs),
    torch.float8_e4m3fn: Quantised(-448, 448, lambda n: n.to(torch.float8_e4m3fn), lambda n, size: n, False),
}
"""How pages are quantised, by their dtype."""


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    slots: Tensor,
) -> None:
    """See `OpSet.append_kv`."""
    append_rows(k, k_cache, k_scales, slots)
    append_rows(v, v_cache, v_scales, slots)


def append_rows(x: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    """Writes x [n, Hkv, d] to its pages, as `append_kv` does with keys and with values."""
    page_size = cache.shape[2]
    pages, offsets = slots.long() // page_size, slots.long() % page_size
    if scales is None:
        cache[pages, :, offsets] = x.to(cache.dtype)
    else:
        cache[pages, :, offsets], scales[pages, :, :, offsets] = _quantise(x.float(), QUANTISED[cache.dtype])


def _quantise(x: Tensor, to: Quantised) -> tuple[Tensor, Tensor]:
    """Packed rows of x [n, Hkv, d], and (zero, scale) [n, Hkv, 2]."""
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if not to.is_integer:
        most = torch.maximum(most, -least)
        least = -most
    scale = ((most - least) / (to.high - to.low)).clamp(min=1e-5)
    zero = (to.low - least / scale).round() if to.is_integer else torch.zeros_like(scale)
    sound = scale.isfinite() & zero.isfinite()
    scale, zero = scale.where(sound, torch.nan), zero.where(sound, 0.0)
    n = (x / scale + zero).clamp(to.low, to.high)
    n = n.round() if to.is_integer else n
    return to.pack(n.where(sound, 0.0)), torch.cat((zero, scale), dim=-1)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    sinks: Tensor | None,
    meta: AttentionMeta,
    out: Tensor,
) -> None:
    """See `OpSet.attention`; where out has fewer elements than q, they are the first of the values."""
    heads = meta.kv_head_of.long()
    starts, page_starts = meta.qo_indptr.tolist(), meta.page_indptr.tolist()
    for request, kv_len in enumerate(meta.kv_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        pages = meta.page_indices[page_starts[request] : page_starts[request + 1]].long()
        keys = tokens_of(k_cache, k_scales, pages, kv_len, q.shape[-1])[:, heads]
        values = tokens_of(v_cache, v_scales, pages, kv_len, q.shape[-1])[:, heads, : out.shape[-1]]
        scores = torch.einsum("qhd,khd->hqk", q[first:last, : len(heads)].float(), keys) * meta.scale
        if meta.soft_cap:
            scores = (scores / meta.soft_cap).tanh() * meta.soft_cap
        reach = torch.arange(kv_len - (last - first), kv_len, device=q.device)[:, None]
        places = torch.arange(kv_len, device=q.device)[None, :]
        if meta.slopes is not None:
            scores = scores + meta.slopes[:, None, None] * (places - reach)
        hidden = places > reach
        if meta.window:
            behind = max(0, kv_len - (last - first) + 1 - meta.window)
            keys[:behind] = values[:behind] = 0  # their pages may be another request's by now
            hidden = hidden | (places <= reach - meta.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, last - first, 1)), -1)
        weights = scores.softmax(-1)[..., :kv_len]
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def tokens_of(cache: Tensor, scales: Tensor | None, pages: Tensor, kv_len: int, size: int) -> Tensor:
    """The first `kv_len` tokens of these pages as float32 [kv_len, Hkv, d]."""
    held = cache[pages]
    if scales is None:
        elements = held.float()
    else:
        zero, scale = scales[pages][..., None].unbind(2)
        elements = (QUANTISED[cache.dtype].unpack(held, size).float() - zero) * scale
    return elements.transpose(1, 2).flatten(0, 1)[:kv_len]
