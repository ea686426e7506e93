"""The sort of many slots by place, on a GPU: sort.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, gpu, kernel, launch
from allspan.kernels.ops import Routing

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_WARPS = 8
_LEAST_STRETCH = 1024
"""Slots that a block sorts while others begin."""


def sort_slots(routing: Routing[Tensor]) -> None:
    """Writes `slots` and `starts` of a routing from its `places`."""
    total, places = routing.places.numel(), routing.starts.shape[1] - 1
    blocks = min(gpu(routing.places.device).multiprocessors, -(-total // _LEAST_STRETCH))
    stretch = -(-total // (blocks * _WARPS * 32)) * _WARPS * 32
    blocks = -(-total // stretch)
    counts = torch.empty(blocks, places, dtype=torch.int32, device=routing.places.device)
    sizes = [np.int32(size) for size in (total, places, stretch)]
    arguments = routing.places, *sizes, counts
    launch(_kernel("count_slots"), (blocks,), _WARPS * 32, arguments, 4 * places, is_early=True)
    found = routing.slots, routing.starts
    shared = 4 * (_WARPS + 1) * places
    launch(_kernel("place_slots"), (blocks,), _WARPS * 32, (*arguments, *found), shared, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    yield from (_kernel(name) for name in ("count_slots", "place_slots"))


def _kernel(name: str) -> Kernel:
    return kernel("moe/sort.cu", name)
