"""Draws and log-softmax over rows of logits, in numpy: the definition, and what runs where nothing is compiled.

`kernels/cpu/sampling` gives the same bits. A token's weight is exp(z), z = (logit - the largest) / temperature,
rounded to a multiple of a power of two so coarse that every sum of weights is exact in float64 (at most 2**53 units; a
token less likely than about 1e-11 times the most likely one weighs nothing at 50,000 tokens). So no outcome depends on
the order of a sum. Filters are thresholds: tokens of equal logits stay or go together, and no outcome depends on how a
sort breaks ties either. Each row is worked on alone, so none depends on the others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.abi.sampling import ALL_MASKED, NOT_FINITE
from allspan.kernels.reference.philox import uniforms

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]
Ints = NDArray[np.int64]
Settings = NDArray[np.void]
"""Rows of SETTINGS (see kernels/abi/sampling.py)."""

# exp(x) = 2**n * exp(r): Cephes expf (S. Moshier).
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_COEFFICIENTS = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_ONE = np.float32(1.0)


def sample_rows(
    logits: Logits, rows: Ints, positions: Ints, targets: Ints, settings: Settings, out: NDArray[np.int32]
) -> None:
    """Writes a token for each row of `logits` [m, vocabulary] into out[:, 0], out int32 [m, columns].

    Row i belongs to row rows[i] of `settings`, and gets the token at `positions[i]` of its request: the one drawn, or
    targets[i] where that is not negative. NOT_FINITE where a logit is NaN or +inf; else ALL_MASKED where all are -inf.
    """
    shares = uniforms(settings["seed"][rows], positions)
    for i, row in enumerate(rows.tolist()):
        highest = logits[i].max()
        if not highest < math.inf:
            out[i, 0] = NOT_FINITE
        elif targets[i] >= 0:
            out[i, 0] = targets[i] if highest > -math.inf else NOT_FINITE
        elif highest == -math.inf:
            out[i, 0] = ALL_MASKED
        elif settings[row]["is_random"]:
            out[i, 0] = draw(logits[i], settings[row], float(shares[i]))
        else:
            out[i, 0] = logits[i].argmax()


def best_tokens(logits: Logits, out: NDArray[np.int32]) -> None:
    """Writes the most likely token of each row of `logits` [m, vocabulary], of equals the first, into `out` [m]; what
    `sample_rows` writes for rows that are not random, where there is none."""
    for i in range(len(logits)):
        highest = logits[i].max()
        if not highest < math.inf:
            out[i] = NOT_FINITE
        else:
            out[i] = ALL_MASKED if highest == -math.inf else logits[i].argmax()


def log_softmax_rows(logits: Logits, counts: Ints, out: NDArray[np.int32]) -> None:
    """Writes log-probabilities of each row of `logits` [m, vocabulary] into `out` int32 [m, 2 + 2·places], unless its
    count is negative or its token, out[:, 0], is: the token's; the ids of the counts[i] most likely ones, best first,
    of equals the lowest first; theirs, after all `places`. Floats as their bits."""
    places = (out.shape[1] - 2) // 2
    values = out.view(np.float32)
    for i in np.flatnonzero((counts >= 0) & (out[:, 0] >= 0)).tolist():
        row, count = logits[i].astype(np.float64), int(counts[i])
        highest = logits[i].max()
        normaliser = math.log(weights(logits[i] - highest).sum()) + float(highest)
        values[i, 1] = row[out[i, 0]] - normaliser
        if count:
            kth = np.partition(logits[i], len(row) - count)[len(row) - count]
            ids = np.flatnonzero(logits[i] >= kth)
            ids = ids[np.argsort(-row[ids], kind="stable")][:count]
            out[i, 2 : 2 + count] = ids
            values[i, 2 + places : 2 + places + count] = row[ids] - normaliser


def penalise_repeated(logits: Logits, ids: Ints, penalty: float) -> None:
    """Divides the logits of distinct `ids` by `penalty`, or multiplies them where negative; none becomes infinite."""
    values = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a penalty near 0
        values = np.where(values < 0, values * penalty, values / penalty)
    logits[ids] = np.minimum(values, np.finfo(np.float32).max)


def penalise_counted(logits: Logits, ids: Ints, counts: NDArray[np.int32], presence: float, frequency: float) -> None:
    """Takes presence + frequency · counts[id] from the logits of distinct `ids`; counts int32 [vocabulary]."""
    logits[ids] -= np.float32(presence) + np.float32(frequency) * counts[ids].astype(np.float32)


def draw(logits: Logits, settings: Any, share: float) -> int:
    """The token at which the running sum of the weights that are left passes `share`, in [0, 1), of their total.

    `settings` is one row of the table. A temperature keeps the order of the logits, so top-k comes first.
    """
    ids = np.arange(len(logits))
    z = (logits - logits.max()) / settings["temperature"]
    if 0 < settings["top_k"] < len(logits):
        kth = len(logits) - settings["top_k"]
        ids = np.flatnonzero(logits >= np.partition(logits, kth)[kth])
    w = weights(z)
    ids = ids[w[ids] > 0]
    if settings["top_p"] < 1:
        ids = ids[most_likely(-z[ids].astype(np.float64), w[ids], settings["top_p"])]
    ids = ids[z[ids] >= settings["min_z"]]
    if settings["typical_p"] < 1:
        unit = rounder(len(logits))
        surprise = ((w[ids] * z[ids] + unit) - unit).sum()
        distances = np.abs(z[ids] - surprise / w[ids].sum())
        ids = ids[most_likely(distances, w[ids], settings["typical_p"])]
    running = np.cumsum(w[ids])
    return int(ids[np.searchsorted(running, share * running[-1], side="right")])


def most_likely(keys: Weights, weights: Weights, share: float) -> NDArray[np.bool_]:
    """Which to keep: each one before which, in the order of their keys, less than `share` of the weight is gathered."""
    order = np.argsort(keys)
    gathered = np.cumsum(weights[order])
    last = keys[order[np.searchsorted(gathered, share * gathered[-1])]]
    kept: NDArray[np.bool_] = keys <= last
    return kept


def weights(z: Logits) -> Weights:
    """exp(z) of a whole row's z <= 0, rounded for exact sums. In float32 step by step, so that it can be repeated."""
    x = np.maximum(z, np.float32(-87.0))
    n = np.rint(x * _LOG2_E)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p = p * r + coefficient
    p = p * (r * r) + (r + _ONE)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    unit = rounder(len(z))
    rounded: Weights = ((p * power).astype(np.float64) + unit) - unit
    return rounded


def rounder(count: int) -> float:
    """Added to a number of at most 1 and taken away again, it leaves a multiple of a unit; `count` such numbers sum to
    at most 2**53 units."""
    return math.ldexp(1.5, count.bit_length() - 1)
