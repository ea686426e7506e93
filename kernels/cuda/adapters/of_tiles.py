"""Low-rank adapters within a gated product of many rows on Hopper: of_tiles.cuh."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.adapter_layout import COLUMNS
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters.expand import check_weights
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, kernel, launch
from allspan.kernels.cuda.linear.gemm.gemm_sm90 import TileAdapters
from allspan.kernels.ops import Routing

MOST_PLACES = 64
_OF_TILES = struct.Struct("=2Q3i4x")


def takes(weights: AdapterWeights[Tensor]) -> bool:
    """Whether `tile_adapters` takes so many adapters."""
    return len(weights.ranks) <= MOST_PLACES and weights.panels.shape[1] > 0


def tile_adapters(sums: Tensor, weights: AdapterWeights[Tensor], routing: Routing[Tensor]) -> TileAdapters:
    """Returns what `gemm_sm90` adds to a product. sums float32 [splits, n, 2 · R]: see `shrink`; the routing lives
    until the product is launched."""
    splits, n, width = sums.shape
    check_weights(n, width, weights, routing)
    places, count, rank, _ = weights.panels.shape
    pairs = torch.empty(n, 2, -(-rank // 16), 8, dtype=torch.int32, device=sums.device)
    sizes = map(np.int32, (n, places, rank, splits))
    arguments = (sums, routing.places, weights.ranks, pairs, *sizes)
    launch(_kernel(weights.panels.dtype), (-(-pairs.numel() // 256),), 256, arguments, is_early=True)
    argument = _OF_TILES.pack(pairs.data_ptr(), routing.places.data_ptr(), places, count, rank)
    return TileAdapters(argument, pairs, weights.panels.view(places * count, rank, COLUMNS))


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """See variants.py."""
    if capability == (9, 0):
        yield from map(_kernel, HALVES)


def _kernel(dtype: torch.dtype) -> Kernel:
    return kernel("adapters/of_tiles.cu", "pack_sums", **element_macro(dtype))
