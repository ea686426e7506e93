"""What positions do to attention's scores beside the rotary embedding: a factor of the query, and ALiBi's slopes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.protos.api.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QueryScale:
    """The factor of a query at position p. `kind` is "log": ln(p + 1) / ln(length) past `length` tokens, else 1 (Qwen 1
    calls it logn); or "log_steps": 1 + beta · ln(1 + floor(p / length)) (Ministral 3, Llama 4)."""

    kind: str
    length: int
    """The tokens that the model was trained on."""
    beta: float = 0.0


def query_scale_table(scale: QueryScale, max_positions: int) -> Tensor:
    """float32 [max_positions]."""
    if scale.kind not in ("log", "log_steps") or scale.length < 2:
        raise ConfigError(f"query_scale: {scale} is not of a kind (log, log_steps) with a length of 2 or more")
    positions = torch.arange(max_positions, dtype=torch.float64)
    if scale.kind == "log":
        factors = ((positions + 1).log() / math.log(scale.length)).clamp(min=1.0)
    else:
        factors = 1 + scale.beta * (positions // scale.length).log1p()
    return factors.float()


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each query head of the whole model (O. Press et al., arXiv:2108.12409): 2^(-8k / m) with k = 1 … m
    for the largest power of two m that is not above num_heads, then every second one of twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * k / power) for k in range(1, power + 1)]
    slopes += [2.0 ** (-4 * (2 * k - 1) / power) for k in range(1, num_heads - power + 1)]
    return tuple(slopes)
