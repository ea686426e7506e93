"""All that lies between the product with a layer's q, k and v weights and its attention."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.ops import HadamardRotation, HeadNorms, KvPages, Rotation
from allspan.kernels.reference import elementwise
from allspan.kernels.reference.attention import append_kv


def rotary_append(
    qkv: Tensor,
    num_heads: int,
    norms: HeadNorms[Tensor],
    rotation: Rotation[Tensor],
    hadamard: HadamardRotation[Tensor],
    pages: KvPages[Tensor],
    slots: Tensor,
) -> None:
    """See `OpSet.rotary_append`."""
    kv_heads = (qkv.shape[1] - num_heads) // 2
    parts = torch.split(qkv, [num_heads, kv_heads, kv_heads], 1)
    q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    if norms.q_weight is not None:
        elementwise.head_norm(q, norms.q_weight, norms.eps)
    if norms.k_weight is not None:
        elementwise.head_norm(k, norms.k_weight, norms.eps)
    elementwise.rotary(q, k, rotation.positions, rotation.cos_sin)
    if rotation.q_scales is not None:
        q.mul_(rotation.q_scales[rotation.positions.long()][:, None, None])
    if hadamard.is_on:
        elementwise.hadamard(q, None)
        elementwise.hadamard(k, hadamard.k_center)
    torch.cat((q, k, v), 1, out=qkv)
    append_kv(k, v, *pages, slots)
