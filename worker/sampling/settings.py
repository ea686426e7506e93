"""Per row of the batch, what its draws need: one table that numpy and native code read alike."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.sampling import SamplingParams

SETTINGS = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("temperature", np.float32),
        ("min_z", np.float32),
        ("top_k", np.int32),
        ("is_random", np.int32),
    ]
)
"""Laid out like `Settings` in kernels/cpu/sampling/sampling.h. `min_z` is the logarithm of min_p."""

Settings = NDArray[np.void]


def settings_of(params: SamplingParams) -> tuple[int, float, float, float, float, int, bool]:
    """A row of the table. A seed that was not drawn counts as 0."""
    min_z = math.log(params.min_p) if params.min_p > 0 else -math.inf
    random = not params.is_greedy
    return params.seed or 0, params.top_p, params.typical_p, params.temperature, min_z, params.top_k, random
