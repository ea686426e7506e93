"""Rendezvous hashing: an order of the replicas for a key that every facade computes alike, without shared state, and
that changes for few keys when a replica comes or goes. (Thaler and Ravishankar, 1998.)"""

from __future__ import annotations

_MASK = 2**64 - 1


def weight(replica: int, key: int) -> int:
    """The replica's weight for a key of 64 bits; the greatest one goes first. (The finaliser of SplitMix64, Steele et
    al., OOPSLA 2014.)"""
    mixed = (key + (replica + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
