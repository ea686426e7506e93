"""Attention of one request whose keys and values lie together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allspan.kernels.cuda.attention.decode import MOST_GROUP, decode_workspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan
from allspan.kernels.cuda.cache.pages import KV, PageTable, dense
from allspan.kernels.library.arrays import Array, keys_and_values, outputs, queries, tensor
from allspan.kernels.library.rope import rotated
from allspan.kernels.library.run import Result, run_decode, run_prefill
from allspan.kernels.library.variant import Variant

_ROWS = 128  # of a tile of queries


def single_decode_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    **options: Any,
) -> Result:
    """Attention of q [heads, head_dim] over k and v [tokens, kv_heads, head_dim] (HND: heads first), float16 or
    bfloat16; k and v may be float8_e4m3fn. Returns [heads, head_dim], with return_lse=True also the logarithm to base 2
    of the sum of the powers of e, float32 [heads].

    options: those of `Variant`, `return_lse`, `out`, and rotary_mode ("NONE", "LLAMA"), an older name of
    pos_encoding_mode. Raises ValueError for what the kernels do not take, TypeError for an unknown option.
    """
    row = tensor("q", q)[None]
    out, return_lse = options.pop("out", None), options.pop("return_lse", False)
    variant = Variant(pos_encoding_mode=pos_encoding_mode).but(options)
    result = _single(row, (k, v), kv_layout, variant, None if out is None else tensor("out", out)[None], return_lse)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


def single_prefill_with_kv_cache(q: Array, k: Array, v: Array, **options: Any) -> Result:
    """Attention of q [queries, heads, head_dim] over k and v, as in `single_decode_with_kv_cache`; with causal=True the
    last query is the last token, and none sees what comes after it. So "append" is this with more tokens than queries.

    Returns out as q, with return_lse=True also float32 [queries, heads]. options: those of `Variant`, `kv_layout`,
    `return_lse`, `out`; scale_q, scale_k, scale_v are q_scale, k_scale, v_scale.
    """
    layout, out = options.pop("kv_layout", "NHD"), options.pop("out", None)
    return_lse = options.pop("return_lse", False)
    for name in ("q", "k", "v"):
        if (scale := options.pop(f"scale_{name}", None)) is not None:
            options[f"{name}_scale"] = scale
    if options.pop("o_dtype", None) not in (None, (x := tensor("q", q)).dtype):
        raise ValueError(f"o_dtype: out has q's, {x.dtype}")
    return _single(tensor("q", q), (k, v), layout, Variant().but(options), out, return_lse)


def single_prefill_with_kv_cache_return_lse(q: Array, k: Array, v: Array, **options: Any) -> Result:
    """`single_prefill_with_kv_cache` with return_lse=True."""
    return single_prefill_with_kv_cache(q, k, v, **options, return_lse=True)


def _single(
    q: Tensor, pair: tuple[Array, Array], layout: str, variant: Variant, out: Array | None, return_lse: bool
) -> Result:
    q = queries("q", q)
    k, v = keys_and_values(*pair, layout)
    count, heads, dim = q.shape
    tokens, kv_heads = k.shape[:2]
    if variant.causal and count > tokens:
        raise ValueError(f"causal: {count} queries are more than {tokens} tokens, of which they are the last")
    if variant.is_rotary:
        line = torch.arange(max(tokens, count), device=q.device)
        angles = variant.rope_scale, variant.rope_theta
        q = rotated(q, line[:count] + (tokens - count), *angles)
        k, v = rotated(k.to(q.dtype), line[:tokens], *angles), v.to(q.dtype).contiguous()
    kv = dense(k, v)
    into = outputs(q, out, None, return_lse)
    ends = torch.arange(2, dtype=torch.int32, device=q.device)
    table = PageTable(ends, ends[:1], torch.full((1,), tokens, dtype=torch.int32, device=q.device))
    if count == 1 and heads <= kv_heads * MOST_GROUP:
        return run_decode(q, kv, table, variant, into, decode_workspace(1, kv_heads, dim, q.device))
    return run_prefill(q, kv, table, _plan(q, kv), variant, into)


def _plan(q: Tensor, kv: KV) -> PrefillPlan:
    """Made on the GPU: nothing is copied there, so that it can be captured."""
    count, heads, _ = q.shape
    group = max(1, heads // max(1, kv.heads))
    tiles = torch.zeros(-(-count * group // _ROWS), 2, dtype=torch.int32, device=q.device)
    tiles[:, 1] = torch.arange(len(tiles) - 1, -1, -1, device=q.device) * _ROWS
    return PrefillPlan(tiles, torch.arange(2, dtype=torch.int32, device=q.device) * count, count, group)
