"""All that lies between the product with a layer's q, k and v weights and its attention."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.ops import Norms, Pages
from allspan.kernels.reference.attention import append_kv
from allspan.kernels.reference.elementwise import hadamard, head_norm, rotary


def rotary_append(
    qkv: Tensor,
    num_heads: int,
    norms: Norms,
    rotation: tuple[Tensor, Tensor],
    spread: tuple[int, Tensor | None],
    pages: Pages,
    slots: Tensor,
) -> None:
    """See `OpSet.rotary_append`."""
    kv_heads = (qkv.shape[1] - num_heads) // 2
    parts = torch.split(qkv, [num_heads, kv_heads, kv_heads], 1)
    q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    q_norm, k_norm, eps = norms
    if q_norm is not None:
        head_norm(q, q_norm, eps)
    if k_norm is not None:
        head_norm(k, k_norm, eps)
    rotary(q, k, *rotation)
    is_spread, center = spread
    if is_spread:
        hadamard(q, None)
        hadamard(k, center)
    torch.cat((q, k, v), 1, out=qkv)
    append_kv(k, v, *pages, slots)
