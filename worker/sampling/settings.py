"""Rows of the table that tells a sampling kernel what to draw by."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.sampling import SamplingParams

Settings = NDArray[np.void]


def settings_of(params: SamplingParams) -> tuple[int, float, float, float, float, int, bool]:
    """A row of the table. A seed that was not drawn counts as 0."""
    min_z = math.log(params.min_p) if params.min_p > 0 else -math.inf
    random = not params.is_greedy
    return params.seed or 0, params.top_p, params.typical_p, params.temperature, min_z, params.top_k, random
