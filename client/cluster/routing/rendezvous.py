"""Rendezvous hashing: an order of the replicas for a key that every facade computes alike, without shared state, and
that changes for few keys when a replica comes or goes. (Thaler and Ravishankar, 1998.)"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def weight(replica: int, key: int) -> int:
    """The replica's weight for a key of 64 bits; the greatest one goes first. (The finaliser of SplitMix64, Steele et
    al., OOPSLA 2014.)"""
    mixed = (key + (replica + 1) * _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def heaviest(replicas: NDArray[np.intp], key: int) -> int:
    """The replica of the greatest weight, the first of equal ones; all weights are computed at once."""
    if len(replicas) == 1:
        return int(replicas[0])
    mixed = replicas.astype(np.uint64)
    mixed *= np.uint64(_STEP)
    mixed += np.uint64((key + _STEP) & _MASK)
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _MULTIPLIERS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return int(replicas[mixed.argmax()])
