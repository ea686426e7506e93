"""Rendezvous hashing: an order of the replicas for a key that every facade computes alike, without shared state, and
that changes for few keys when a replica comes or goes. (Thaler and Ravishankar, 1998.)"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = 2**64 - 1


def weight(replica: int, key: int) -> int:
    """The replica's weight for a key of 64 bits; the greatest one goes first. (The finaliser of SplitMix64, Steele et
    al., OOPSLA 2014.)"""
    mixed = (key + (replica + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def heaviest(replicas: Sequence[int], key: int) -> int:
    """The replica of the greatest weight, the first of equal ones; all weights are computed at once."""
    mixed = np.array(replicas, np.uint64)
    mixed += np.uint64(1)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return replicas[int(mixed.argmax())]
