"""Rotary position embedding, in place or not: rotary_append.cu, with a table of angles for each token.

Elements i and i + rotary_dim / 2 turn together (NeoX), as in FlashInfer with interleave=False. q and k: float16 or
bfloat16 [n, heads, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.cuda.rows.rotary_append import rotary
from allspan.kernels.library.arrays import Array, ints, queries, tensor

_LLAMA31 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192.0}


def cos_sin_of(positions: Tensor, rotary_dim: int, scale: float, theta: float, llama31: dict[str, float]) -> Tensor:
    """float32 [n, rotary_dim]: cosines, then sines of (position / scale) · theta^(-2i / rotary_dim); with llama31,
    only slow frequencies are scaled (Llama 3.1's)."""
    half = torch.arange(rotary_dim // 2, dtype=torch.float64, device=positions.device)
    frequency = theta ** (-2 * half / rotary_dim)
    if llama31:
        low, high = llama31["low_freq_factor"], llama31["high_freq_factor"]
        turns = frequency * llama31["old_context_len"] / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (smooth + (1 - smooth) / scale)
    else:
        frequency = frequency / scale
    angles = positions.double()[:, None] * frequency
    return torch.cat((angles.cos(), angles.sin()), 1).float()


def turn(q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
    """Row i of both by row i of cos_sin, in place."""
    rotary(q, k, torch.arange(len(q), dtype=torch.int32, device=q.device), cos_sin)


def rotated(x: Tensor, positions: Tensor, scale: float | None, theta: float | None) -> Tensor:
    """A copy of x [n, heads, head_dim], at these positions."""
    turned = x.clone(memory_format=torch.contiguous_format)
    cos_sin = cos_sin_of(positions, x.shape[-1], scale or 1.0, theta or 1e4, {})
    turn(turned, turned[:, :0], cos_sin)
    return turned


def _positions(indptr: Array, offsets: Array, n: int, device: torch.device) -> Tensor:
    """Returns the position of each row: offsets[r] + i - indptr[r] for row i of request r."""
    starts, first = ints("indptr", indptr, device), ints("offsets", offsets, device)
    rows = torch.arange(n, dtype=torch.int32, device=device)
    request = torch.searchsorted(starts, rows, right=True) - 1
    return first[request] + rows - starts[request]


def _pair(q: Array, k: Array, in_place: bool) -> tuple[Tensor, Tensor]:
    given = tensor("q", q), tensor("k", k)
    if not in_place:
        return given[0].clone().contiguous(), given[1].clone().contiguous()
    for name, x in zip("qk", given, strict=True):
        if queries(name, x) is not x:
            raise ValueError(f"{name}: strides {x.stride()}; in place, heads of a row must lie one after the other")
    return given


def _apply(q: Tensor, k: Tensor, positions: Tensor, options: dict[str, Any], llama31: bool) -> None:
    given: dict[str, Any] = {"rotary_dim": None, "interleave": False, "rope_scale": 8.0 if llama31 else 1.0}
    given |= {"rope_theta": 5e5 if llama31 else 1e4} | (_LLAMA31 if llama31 else {})
    if strange := sorted(set(options) - set(given)):
        raise TypeError(f"{strange[0]}: there is no such argument (there are {', '.join(given)})")
    given |= options
    if given["interleave"]:
        raise ValueError("interleave: True is not known; order the weights' rows so that halves turn together")
    factors = {name: float(given[name]) for name in _LLAMA31} if llama31 else {}
    dim = given["rotary_dim"] or q.shape[-1]
    turn(q, k, cos_sin_of(positions, dim, float(given["rope_scale"]), float(given["rope_theta"]), factors))


def _by_indptr(name: str, in_place: bool, llama31: bool) -> Callable[..., Any]:
    def apply(q: Array, k: Array, indptr: Array, offsets: Array, **options: Any) -> tuple[Tensor, Tensor] | None:
        turned = _pair(q, k, in_place)
        _apply(*turned, _positions(indptr, offsets, len(turned[0]), turned[0].device), options, llama31)
        return None if in_place else turned

    apply.__name__ = apply.__qualname__ = name
    return apply


def _by_pos_ids(name: str, in_place: bool, llama31: bool) -> Callable[..., Any]:
    def apply(q: Array, k: Array, pos_ids: Array, **options: Any) -> tuple[Tensor, Tensor] | None:
        turned = _pair(q, k, in_place)
        _apply(*turned, ints("pos_ids", pos_ids, turned[0].device), options, llama31)
        return None if in_place else turned

    apply.__name__ = apply.__qualname__ = name
    return apply


apply_rope = _by_indptr("apply_rope", in_place=False, llama31=False)
apply_rope_inplace = _by_indptr("apply_rope_inplace", in_place=True, llama31=False)
apply_llama31_rope = _by_indptr("apply_llama31_rope", in_place=False, llama31=True)
apply_llama31_rope_inplace = _by_indptr("apply_llama31_rope_inplace", in_place=True, llama31=True)
apply_rope_pos_ids = _by_pos_ids("apply_rope_pos_ids", in_place=False, llama31=False)
apply_rope_pos_ids_inplace = _by_pos_ids("apply_rope_pos_ids_inplace", in_place=True, llama31=False)
apply_llama31_rope_pos_ids = _by_pos_ids("apply_llama31_rope_pos_ids", in_place=False, llama31=True)
apply_llama31_rope_pos_ids_inplace = _by_pos_ids("apply_llama31_rope_pos_ids_inplace", in_place=True, llama31=True)


def apply_rope_with_cos_sin_cache(
    positions: Array, query: Array, key: Array, head_size: int, cos_sin_cache: Array, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """query [n, heads · head_size] and key likewise; cos_sin_cache float32 [positions, rotary_dim], cosines first."""
    q, k = (tensor(name, x).clone().contiguous() for name, x in (("query", query), ("key", key)))
    apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_size, cos_sin_cache, is_neox)
    return q, k


def apply_rope_with_cos_sin_cache_inplace(
    positions: Array, query: Array, key: Array, head_size: int, cos_sin_cache: Array, is_neox: bool = True
) -> None:
    """`apply_rope_with_cos_sin_cache` in place."""
    if not is_neox:
        raise ValueError("is_neox: False is not known; order the weights' rows so that halves turn together")
    q, k = (tensor(name, x) for name, x in (("query", query), ("key", key)))
    table = tensor("cos_sin_cache", cos_sin_cache)
    rotary(q.view(len(q), -1, head_size), k.view(len(k), -1, head_size), ints("positions", positions, q.device), table)
