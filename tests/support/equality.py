"""Greedy outputs, token by token; where two tokens tie within rounding, a difference is excused and reported."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.reference.philox import uniforms

TIE = 1e-4
"""In logits, and in shares of the probability."""


NEAR = 0.1
"""Of the spread of a row's logits: what bfloat16 rounds away."""


class TieWarning(UserWarning):
    """A difference that was excused."""


def assert_greedy(output: Sequence[int], logits: Tensor, what: str) -> int:
    """Each token must be the largest of its row of logits [len(output), V], given those before it. Returns ties."""
    ties = 0
    for position, token in enumerate(output):
        row = logits[position]
        gap = float(row.max() - row[token])
        assert gap <= TIE, f"{what}: token {position} is {token}, {gap:.6f} below {int(row.argmax())} in logits"
        if gap > 0:
            ties += 1
            warnings.warn(f"{what}: tie of {gap:.1e} at token {position} excused", TieWarning, stacklevel=2)
    return ties


def assert_nearly_greedy(output: Sequence[int], logits: Tensor, what: str) -> None:
    """Each token must be the largest of its row of logits [len(output), V], or as good but for what bfloat16 rounds
    away; nine of ten must be the largest."""
    rows = logits[: len(output)]
    misses = (rows.max(1).values - rows.gather(1, torch.tensor(output)[:, None])[:, 0]) / rows.std(1)
    worst, others = int(misses.argmax()), int((misses > 0).sum())
    assert misses[worst] <= NEAR, f"{what}: token {worst} is {output[worst]}, {misses[worst]:.3f} of the spread too low"
    assert others <= len(output) // 10, f"{what}: {others} of {len(output)} tokens are not the best"


def assert_equal_but_for_ties(first: Sequence[int], second: Sequence[int], logits: Tensor, what: str) -> int:
    """Equal, or different from a position on where both tokens lie within TIE of the largest logit."""
    if tuple(first) == tuple(second):
        return 0
    position = next(i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    row = logits[position]
    gap = float(row.max() - row[[first[position], second[position]]].min())
    assert gap <= TIE, (
        f"{what}: token {position} is {first[position]} and {second[position]}, {gap:.6f} apart in logits"
    )
    warnings.warn(f"{what}: tie of {gap:.1e} at token {position} excused", TieWarning, stacklevel=2)
    return 1


def assert_drawn(
    output: Sequence[int], logits: Tensor, temperature: float, seed: int, prompt_len: int, what: str
) -> int:
    """Each token must be the one that the seed's number for its position draws from softmax(logits / temperature), in
    the order of ids; off by less than TIE is a near-tie, excused and reported. Returns those."""
    ties = 0
    for i, token in enumerate(output):
        ends = (logits[i].double() / temperature).softmax(0).cumsum(0)
        share = float(uniforms(np.array([seed], dtype=np.uint64), np.array([prompt_len + i]))[0])
        low, high = float(ends[token - 1]) if token else 0.0, float(ends[token])
        miss = max(low - share, share - high)
        assert miss <= TIE, f"{what}: token {i} is {token}, drawn by {low:.6f} to {high:.6f}, not by {share:.6f}"
        if miss > 0:
            ties += 1
            warnings.warn(f"{what}: near-tie of {miss:.1e} at token {i} excused", TieWarning, stacklevel=2)
    return ties
