"""Merges the parts of rows whose tokens were cut, by more than one thread block a tile: see merge.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, kernel, launch

MOST_TILES, LEAST_PIECES = 64, 8
"""Tiles of a launch, at most, and pieces of a tile from which on this pays: the block that writes the last part of a
tile needs some 4 µs for each other one."""


def pays(tiles: int, blocks: int) -> bool:
    """Whether so many blocks cut so few tiles into many pieces. By sizes alone: lengths are not known on the host."""
    return 0 < tiles <= MOST_TILES and blocks // tiles > LEAST_PIECES


def merge_rows(
    out: Tensor, lse: Tensor | None, partial: Tensor, kv_lens: Tensor, cutting: tuple[int, int, int, int, int]
) -> None:
    """Writes the rows of out [rows, heads, L] and lse [rows, heads] that `latent_attend` has left in parts. cutting:
    rows of a tile, blocks of the launch, tiles that have stretches together, tokens of a unit, and units that a tile
    has at least."""
    rows, heads, latent = out.shape
    arguments = [out, lse, np.int32(rows), np.int32(heads), partial, kv_lens, *map(np.int32, cutting)]
    launch(_kernel(latent, element_macro(out.dtype)), (heads, rows), latent // 4, arguments, 0, True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of released models' sizes; others are compiled at their first use."""
    for dtype in HALVES:
        yield _kernel(512, element_macro(dtype))


def _kernel(latent: int, kind: dict[str, int]) -> Kernel:
    return kernel("latent/attend/merge.cu", "merge_rows", LATENT=latent, **kind)
