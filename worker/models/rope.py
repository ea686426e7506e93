"""Rotary embedding: inverse frequencies of each kind and the table of cosines and sines.

Computed in float32 step by step as transformers does (`modeling_rope_utils`), so that long positions agree with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allspan.worker.step.row_inputs import POSITION_AXES

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary embedding. `kind` is one of `KINDS`, or "by_prompt", Qwen 1's dynamic NTK; the rest are that kind's
    parameters (Hugging Face names)."""

    theta: float
    kind: str = "default"
    rotary_dim: int = 0
    """Elements of a head that turn; 0: all."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    """The scale of cos and sin of YaRN and longrope; 0: 0.1 · ln(factor) + 1."""
    truncate: bool = True
    """YaRN: whether the ends of the ramp are rounded outwards to whole elements."""
    freq_factors: tuple[float, ...] = ()
    """Divisors of the inverse frequencies, one a pair of elements (how GGUF files carry llama3 scaling);
    those of longrope's short contexts."""
    axes: tuple[int, ...] = ()
    """Multimodal rotary embedding: for each pair of elements the position of a token that turns it, as an index into
    `POSITION_AXES`; empty: a token has one position."""
    long_freq_factors: tuple[float, ...] = ()
    """longrope: the factors where the model's context is longer than the original one. The context decides, once: a
    request's keys would have to be computed anew where it grows past the border."""

    @property
    def num_positions(self) -> int:
        """Positions that a token has."""
        return len(POSITION_AXES) if self.axes else 1

    @property
    def is_by_prompt(self) -> bool:
        """Whether the length of a request's prompt decides."""
        return self.kind == "by_prompt"

    def prompt_lengths(self, max_positions: int) -> tuple[int, ...]:
        """See `RowInputs.prompt_lengths`: with "by_prompt" the original context, and each power of two of it."""
        lengths, length = [], self.original_max_position_embeddings
        while self.is_by_prompt and length < max_positions:
            lengths.append(length)
            length *= 2
        return tuple(lengths)


def cos_sin_table(rotary: RotarySpec | None, head_dim: int, max_positions: int, axis: int | None = None) -> Tensor:
    """float32 [max_positions, rot]: cosines in the first half of a row, sines in the second; without a rotary embedding
    rot is 0. Where the prompt's length decides, so many rows for each table, one table below the other.
    `axis`: zeros but for the pairs that this axis turns, so that the rows of all axes add up."""
    if rotary is None:
        return torch.zeros((max_positions, 0))
    if rotary.is_by_prompt:
        tables = range(len(rotary.prompt_lengths(max_positions)) + 1)
        return torch.cat([cos_sin_table(_stretched(rotary, head_dim, n), head_dim, max_positions) for n in tables])
    inverse, scale = inverse_frequencies(rotary, head_dim, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse[None, :]
    table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1).contiguous()
    return table if axis is None else table * (torch.tensor(rotary.axes * 2) == axis)


def _stretched(rotary: RotarySpec, head_dim: int, doublings: int) -> RotarySpec:
    """Qwen 1's dynamic NTK: what a prompt of up to 2^doublings original contexts is rotated by."""
    size, alpha = rotary.rotary_dim or head_dim, 2.0 ** (doublings + 1) - 1
    return replace(rotary, kind="default", theta=rotary.theta * alpha ** (size / (size - 2)))


def mean_rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """float32 [.., d]: the mean over all positions of `cos_sin` of x [.., d] turned to each of them."""
    rot = cos_sin.shape[1]
    cos, sin = cos_sin.mean(0, dtype=torch.float64).chunk(2)
    low, high = x[..., :rot].double().chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return torch.cat((turned.float(), x[..., rot:].float()), dim=-1).contiguous()


def inverse_frequencies(rotary: RotarySpec, head_dim: int, max_positions: int = 0) -> tuple[Tensor, float]:
    """float32 [rot / 2] and the factor of cosines and sines, for a context of so many positions."""
    size = rotary.rotary_dim or head_dim
    inverse = 1.0 / _powers(rotary.theta, size)
    scale = 1.0
    if rotary.kind == "linear":
        inverse = inverse / rotary.factor
    elif rotary.kind == "llama3":
        inverse = _llama3(rotary, inverse)
    elif rotary.kind == "yarn":
        inverse = _yarn(rotary, size)
        scale = rotary.attention_factor or yarn_scale(rotary.factor)
    elif rotary.kind == "longrope":
        is_long = max_positions > rotary.original_max_position_embeddings
        factors = torch.tensor(rotary.long_freq_factors if is_long else rotary.freq_factors, dtype=torch.float32)
        return 1.0 / (factors * _powers(rotary.theta, size)), rotary.attention_factor
    elif rotary.kind == "dynamic":
        inverse = 1.0 / _powers(_dynamic_theta(rotary, size, max_positions), size)
    if rotary.freq_factors:
        inverse = inverse / torch.tensor(rotary.freq_factors, dtype=torch.float32)
    return inverse, scale


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature (https://arxiv.org/abs/2309.00071, section 3.4), applied to cosines and sines."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic_theta(rotary: RotarySpec, size: int, max_positions: int) -> float:
    """NTK-aware scaling: a base by the length of the model's context, the same for all requests."""
    times = max(1.0, max_positions / rotary.original_max_position_embeddings)
    base: float = rotary.theta * (rotary.factor * times - (rotary.factor - 1)) ** (size / (size - 2))
    return base


def _powers(theta: float, size: int) -> Tensor:
    exponents: Tensor = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size
    return torch.pow(theta, exponents)


def _llama3(rotary: RotarySpec, inverse: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    original = rotary.original_max_position_embeddings
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > original / low, inverse / rotary.factor, inverse)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rotary.factor + blend * stretched
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def _yarn(rotary: RotarySpec, size: int) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): fast elements keep their frequency, slow ones are interpolated."""

    def element(rotations: float) -> float:
        """Which element turns so many times over the original context."""
        original = rotary.original_max_position_embeddings
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = element(rotary.beta_fast), element(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    powers = _powers(rotary.theta, size)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (rotary.factor * powers)) * (1 - keep) + (1.0 / powers) * keep
