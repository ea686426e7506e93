"""Ops that treat every row on its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.ops import ACTIVATIONS


def embedding(ids: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
    """See `OpSet.embedding`."""
    if weight.shape[0] == 0:
        out.zero_()
        return
    rows = ids.long() - first_row
    ours = (rows >= 0) & (rows < weight.shape[0])
    taken = weight[rows.clamp(0, weight.shape[0] - 1)].to(out.dtype)
    out.copy_(torch.where(ours[:, None], taken, torch.zeros_like(taken)))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.rms_norm`."""
    out.copy_(_normed(x, weight, eps))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.add_rms_norm`."""
    residual.add_(x)
    out.copy_(_normed(residual, weight, eps))


def layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.layer_norm`."""
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    out.copy_(centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight.float())


def add(x: Tensor, residual: Tensor) -> None:
    """See `OpSet.add`."""
    residual.add_(x)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `OpSet.head_norm`."""
    x.copy_(_normed(x, weight, eps))


def mean_squares(x: Tensor, shares: Tensor, out: Tensor) -> None:
    """See `OpSet.mean_squares`."""
    out.copy_((x.float().square().sum(2)[:, None] * shares).sum(2))


def norm_heads(x: Tensor, means: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """See `OpSet.norm_heads`."""
    first = 0
    for kind, weight in enumerate((q_weight, k_weight)):
        heads = x[:, first : first + weight.numel() // x.shape[2]]
        first += heads.shape[1]
        factors = torch.rsqrt(means[:, kind] + eps)[:, None, None]
        heads.copy_(heads.float() * factors * weight.view(heads.shape[1:]))


def gated(gate: Tensor, activation: str, up: Tensor) -> Tensor:
    """Returns activation(gate) · up, or what `OpSet.gated_mul` says of clamped_swiglu."""
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        # As the other backends have it: torch's own cancels in float32 far below 0.
        return gate * torch.sigmoid(gate * (1.5957691216057308 + 0.07135481282553515 * gate * gate)) * up
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
    raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")


def gated_mul(gate_up: Tensor, activation: str, out: Tensor) -> None:
    """See `OpSet.gated_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(gated(gate, activation, up))


def soft_cap(x: Tensor, cap: float) -> None:
    """See `OpSet.soft_cap`."""
    torch.mul(torch.tanh(x / cap), cap, out=x)


def gather_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """See `OpSet.gather_rows`."""
    out.copy_(x[rows.long()])


def put_rows(x: Tensor | None, rows: Tensor | None, scale: float, out: Tensor) -> None:
    """See `OpSet.put_rows`."""
    if x is not None and rows is not None:
        out.index_copy_(0, rows.to(out.device), (x * scale).to(out.device, out.dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """See `OpSet.rotary`."""
    rot = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()][:, None, :].chunk(2, dim=-1)
    for x in (q, k):
        x[..., :rot] = _rotated(x[..., :rot].float(), cos, sin).to(x.dtype)


def hadamard(x: Tensor, center: Tensor | None) -> None:
    """See `OpSet.hadamard`."""
    size = x.shape[-1] & -x.shape[-1]
    turned = x.float() if center is None else x.float() - center
    half = 1
    while half < size:
        first, second = turned.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half).unbind(-2)
        turned = torch.stack((first + second, first - second), dim=-2)
        half *= 2
    x.copy_(turned.reshape(x.shape) * size**-0.5)


def gather_columns(x: Tensor, columns: Tensor, out: Tensor) -> None:
    """See `OpSet.gather_columns`."""
    torch.index_select(x, 1, columns, out=out)


def put_columns(x: Tensor, first: int, out: Tensor) -> None:
    """See `OpSet.put_columns`."""
    out[:, first : first + x.shape[1]] = x
