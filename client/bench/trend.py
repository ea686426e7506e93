"""Tests whether a series of figures rises."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def trend(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares through (x, y): the slope and its standard error, as if the errors were independent.

    (0, 0) for fewer than three points, or all at one x.
    """
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return 0.0, 0.0
    x_mean, y_mean = (statistics.fmean(values) for values in zip(*points, strict=True))
    square = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / square
    residual = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return slope, math.sqrt(residual / (len(points) - 2) / square)
