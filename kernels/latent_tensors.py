"""What ops of attention over latents take together."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
"""Tensor, or what stands for one while a program is built."""


class LatentWeights(NamedTuple, Generic[T]):
    """What makes keys and values of a latent of L elements, head by head; float32 or of 16 bits, one dtype."""

    k_up: T
    """[Hq, L, d]: a head's keys, without those that turn, are latent · k_up."""
    v_up: T
    """[Hq, e, L]: its values are latent · v_upᵀ."""


class LatentSizes(NamedTuple):
    """Elements of a latent, of the part of a key that is made of it, of what turns, and of a value."""

    latent: int
    key: int
    rot: int
    value: int


class NewLatents(NamedTuple, Generic[T]):
    """Latents as `OpSet.latent_append` takes them, what norms them, and where they go."""

    kv: T
    weight: T
    eps: float
    slots: T


class LatentPages(NamedTuple, Generic[T]):
    """Pages of latents and their scales."""

    cache: T
    scales: T | None


class LatentRooms(NamedTuple, Generic[T]):
    """What `OpSet.latent_attention` needs for a while."""

    absorbed: T
    mixed: T
