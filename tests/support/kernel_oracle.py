"""Every op of the op set in float64, written for clarity: what the backends are measured against.

Each function has the signature of the op in allspan/kernels/ops.py and works in place on float64 (and int32) tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from allspan.kernels.attention_meta import AttentionMeta


def embedding(ids: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
    for token, index in enumerate(ids.tolist()):
        row = index - first_row
        out[token] = weight[row] if 0 <= row < weight.shape[0] else 0


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    out.copy_(x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    residual += x
    rms_norm(residual, weight, eps, out)


def add(x: Tensor, residual: Tensor) -> None:
    residual += x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(x @ weight.T + (0 if bias is None else bias))


def head_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    rms_norm(x.clone(), weight, eps, x)


def mean_squares(x: Tensor, shares: Tensor, out: Tensor) -> None:
    for token, heads in enumerate(x):
        for kind, factors in enumerate(shares):
            out[token, kind] = sum(factor * head.square().sum() for factor, head in zip(factors, heads, strict=True))


def norm_heads(x: Tensor, means: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    for kind, (first, weight) in enumerate(((0, q_weight), (len(q_weight), k_weight))):
        flat = x.flatten(1)[:, first : first + len(weight)]
        flat *= weight / (means[:, kind, None] + eps).sqrt()


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    half = cos_sin.shape[1] // 2
    for x in (q, k):
        for token, position in enumerate(positions.tolist()):
            cos, sin = cos_sin[position, :half], cos_sin[position, half:]
            low, high = x[token, :, :half].clone(), x[token, :, half : 2 * half].clone()
            x[token, :, :half] = low * cos - high * sin
            x[token, :, half : 2 * half] = high * cos + low * sin


def hadamard(x: Tensor, center: Tensor | None) -> None:
    """Entry (i, j) of the matrix is -1 where i and j have an odd number of bits in common."""
    size = math.gcd(x.shape[-1], 2**20)
    entries = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    matrix = torch.tensor(entries, dtype=torch.float64) / size**0.5
    for token in x:
        for head, row in enumerate(token):
            moved = row if center is None else row - center[head]
            row.copy_((moved.view(-1, size) @ matrix).flatten())


LOWEST_AND_HIGHEST = {torch.int8: (-128, 127), torch.uint8: (0, 15)}
"""Of the integers in quantised pages, by dtype; uint8 holds two a byte, the first in the low half."""


def quantised(row: Tensor, dtype: torch.dtype) -> tuple[list[int], float, float]:
    """(numbers, zero, scale) of the elements of one token and head."""
    low, high = LOWEST_AND_HIGHEST[dtype]
    values = row.tolist()
    scale = max((max(values) - min(values)) / (high - low), 1e-5)
    zero = float(round(low - min(values) / scale))
    return [min(max(round(x / scale + zero), low), high) for x in values], zero, scale


def packed(numbers: list[int], dtype: torch.dtype) -> Tensor:
    if dtype is torch.int8:
        return torch.tensor(numbers, dtype=dtype)
    even = numbers + [0] * (len(numbers) % 2)
    return torch.tensor([low + 16 * high for low, high in zip(even[::2], even[1::2], strict=True)], dtype=dtype)


def elements(cache: Tensor, scales: Tensor | None, size: int) -> Tensor:
    """float64 [..., page_size, size] of pages in any format."""
    if scales is None:
        return cache.double()
    if cache.dtype is torch.uint8:
        numbers = cache.new_empty((*cache.shape[:-1], 2 * cache.shape[-1]))
        numbers[..., ::2], numbers[..., 1::2] = cache % 16, cache // 16
        cache = numbers[..., :size]
    zero, scale = scales.double()[..., 0, :, None], scales.double()[..., 1, :, None]
    return (cache.double() - zero) * scale


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    slots: Tensor,
) -> None:
    page_size = k_cache.shape[2]
    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        for token, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, page_size)
            if scales is None:
                cache[page, :, offset] = x[token]
                continue
            for head, row in enumerate(x[token]):
                numbers, zero, scale = quantised(row, cache.dtype)
                cache[page, head, offset] = packed(numbers, cache.dtype)
                scales[page, head, :, offset] = torch.tensor([zero, scale], dtype=torch.float64)


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
    page_size = k_cache.shape[2]
    held_keys, held_values = elements(k_cache, k_scales, q.shape[-1]), elements(v_cache, v_scales, q.shape[-1])
    for request, kv_len in enumerate(meta.kv_lens.tolist()):
        first, last = meta.qo_indptr[request : request + 2].tolist()
        pages = meta.page_indices[meta.page_indptr[request] :].tolist()
        for token in range(first, last):
            seen = kv_len - (last - token) + 1
            for head, kv_head in enumerate(meta.kv_head_of.tolist()):
                used = pages[: math.ceil(seen / page_size)]
                behind = max(0, seen - meta.window) if meta.window else 0
                keys = torch.cat([held_keys[page, kv_head] for page in used])[behind:seen]
                values = torch.cat([held_values[page, kv_head] for page in used])[behind:seen]
                logits = keys @ q[token, head] * meta.scale
                if meta.soft_cap:
                    logits = meta.soft_cap * (logits / meta.soft_cap).tanh()
                if meta.slopes is not None:
                    logits = logits - meta.slopes[head].double() * torch.arange(seen - behind).flip(0)
                if sinks is not None:
                    logits = torch.cat((logits, sinks[head : head + 1]))
                out[token, head] = logits.softmax(-1)[: seen - behind] @ values


def gated_mul(gate_up: Tensor, activation: str, out: Tensor) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        out.copy_(gate / (1 + (-gate).exp()) * up)
    elif activation == "clamped_swiglu":
        gate = gate.clamp(max=7)
        out.copy_(gate / (1 + (-1.702 * gate).exp()) * (up.clamp(-7, 7) + 1))
    else:
        out.copy_(gate / 2 * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up)


def soft_cap(x: Tensor, cap: float) -> None:
    x.copy_(cap * (x / cap).tanh())


def layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    centered = x - x.mean(-1, keepdim=True)
    out.copy_(centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight)


def gather_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    for to, row in enumerate(rows.tolist()):
        out[to] = x[row]


def put_rows(x: Tensor | None, rows: Tensor | None, scale: float, out: Tensor) -> None:
    for i, row in enumerate([] if rows is None else rows.tolist()):
        out[row] = scale * x[i]  # type: ignore[index]


def put_columns(x: Tensor, first: int, out: Tensor) -> None:
    for column in range(x.shape[1]):
        out[:, first + column] = x[:, column]


def gather_columns(x: Tensor, columns: Tensor, out: Tensor) -> None:
    for to, column in enumerate(columns.tolist()):
        out[:, to] = x[:, column]
