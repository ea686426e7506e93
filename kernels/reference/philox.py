"""Counter-based uniform numbers: the same (seed, position) gives the same number, whoever asks and in whichever order.

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """counter [4, n] and key [2, n] hold 32-bit words; returns four random 32-bit words [4, n] each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One float64 in [0, 1) for each seed [n] (the key) and position [n] (the counter), a multiple of 2**-53."""
    at = positions.astype(np.uint64)
    zero = np.zeros_like(at)
    key = np.stack([seeds & _LOW, seeds >> _32])
    words = philox4x32(np.stack([at & _LOW, at >> _32, zero, zero]), key)
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    fractions: NDArray[np.float64] = (high * np.float64(2**26) + low) * np.float64(2.0**-53)
    return fractions
