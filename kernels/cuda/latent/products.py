"""Products of a few rows with the matrices of each head, on a GPU: see products.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from allspan.kernels.cuda.attention.decode import DecodeWorkspace
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.latent.attend import Cutting, tile_rows_of
from allspan.kernels.ops import LatentWeights

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_ROWS = 8
"""With more, cuBLAS is faster."""

_THREADS, _WARPS = 256, 8
_INPUTS = 512  # at most, of a head


def runs(rows: int, weights: LatentWeights[Tensor]) -> bool:
    """Whether the kernels are for so many rows and these matrices."""
    heads, latent, key = weights.k_up.shape
    fits = heads <= 8 * tile_rows_of(heads) and latent <= _INPUTS and latent % 8 == 0 and key % 8 == 0
    return 0 < rows <= MOST_ROWS and fits and rows * -(-heads // tile_rows_of(heads)) <= MOST_ROWS * 8


def absorb(q: Tensor, weights: LatentWeights[Tensor], out: Tensor) -> None:
    """out[i, h] = q[i, h, : key] · k_up[h]ᵀ: queries of latents."""
    _product(q, weights.k_up, out, None)


def values(
    sums: Tensor,
    weights: LatentWeights[Tensor],
    table: PageTable,
    workspace: DecodeWorkspace,
    out: Tensor,
    cutting: Cutting,
) -> None:
    """out[i, h] = sums[i, h] · v_up[h]ᵀ, where `latent_attend` made sums, with this cutting, and left cut ones in the
    workspace."""
    _product(sums, weights.v_up, out, (table, workspace, cutting))


def _product(x: Tensor, weight: Tensor, out: Tensor, parts: tuple[PageTable, DecodeWorkspace, Cutting] | None) -> None:
    heads, features, inputs = weight.shape
    of_block = (2 if inputs > 256 else 8) * _WARPS
    partial, kv_lens, cutting = (parts[1].partial, parts[0].kv_lens, parts[2]) if parts else (None, None, Cutting(16))
    arguments = [
        x, np.int64(x.stride(0)), np.int32(x.stride(1)), weight, out, np.int64(out.stride(0)), np.int32(out.stride(1)),
        np.int32(len(x)), np.int32(heads), np.int32(features), partial, kv_lens, np.int32(cutting.rows),
        np.int32(gpu(x.device).multiprocessors), np.int32(cutting.beside), np.int32(cutting.tokens),
        np.int32(cutting.is_sm90),
    ]  # fmt: skip
    function = _kernel(inputs, int(parts is not None), element_macro(x.dtype))
    launch(function, (heads, -(-features // of_block)), _THREADS, arguments, 0, True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of released models' sizes; others are compiled at their first use."""
    for dtype in HALVES:
        for inputs, merges in ((128, 0), (192, 0), (512, 1)):
            yield _kernel(inputs, merges, element_macro(dtype))


def _kernel(inputs: int, merges: int, kind: dict[str, int]) -> Kernel:
    return kernel("latent/products.cu", "latent_product", INPUTS=inputs, MERGES=merges, **kind)
