"""Vectors as an engine sends them, cut, normalised and compared."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def embedding(vector: bytes, dimensions: int | None = None, normalize: bool = True) -> Floats:
    """float32 [dimensions]: the first elements of a vector (None: all), then brought to length 1 if `normalize`. A
    vector of zeros stays one."""
    values = np.frombuffer(vector, dtype="<f4")[:dimensions].astype(np.float64)
    if normalize and (length := np.sqrt((values * values).sum())):
        values = values / length
    return values.astype(np.float32)


def to_base64(values: Floats) -> str:
    """The vector's little-endian float32 bytes in base64, as OpenAI's clients read them."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def cosine(one: Floats, other: Floats) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is all zeros."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / lengths) if lengths else 0.0


def probability(vector: bytes) -> float:
    """The probability of yes, from the difference of the two answers' logits."""
    difference = float(np.frombuffer(vector, dtype="<f4")[0])
    return float(1.0 / (1.0 + np.exp(-np.float64(difference)))) if difference >= 0 else _small(difference)


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[tuple[int, float]]:
    """(place, score) of the `top_n` best (None: all), the best first; equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    return [(place, scores[place]) for place in order[:top_n]]


def _small(difference: float) -> float:
    power = float(np.exp(np.float64(difference)))
    return power / (1.0 + power)
