"""All that lies between the product with a layer's q, k and v weights and its attention."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.reference.attention import append_kv
from allspan.kernels.reference.elementwise import hadamard, head_norm, rotary


def rotary_append(  # noqa: PLR0913  (as many as the ops that it is made of)
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    center: Tensor | None,
    spread: int,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    slots: Tensor,
    num_heads: int,
) -> None:
    """See `OpSet.rotary_append`."""
    kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = torch.split(qkv, [num_heads, kv_heads, kv_heads], 1)
    if q_norm is not None:
        head_norm(q, q_norm, eps)
    if k_norm is not None:
        head_norm(k, k_norm, eps)
    rotary(q, k, positions, cos_sin)
    if spread:
        hadamard(q, None)
        hadamard(k, center)
    append_kv(k, v, k_cache, v_cache, k_scales, v_scales, slots)
