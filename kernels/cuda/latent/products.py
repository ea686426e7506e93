"""Products of a few rows with the matrices of each head, on a GPU: see products.cu."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.decode import DecodeWorkspace
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.latent.append import PAGES, append_arguments
from allspan.kernels.cuda.latent.attend.attend import Cutting, tile_rows_of
from allspan.kernels.cuda.rows.arguments import TYPES
from allspan.kernels.latent_tensors import LatentWeights, NewLatents
from allspan.kernels.ops import Rotation

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_ROWS = 8
"""With more, cuBLAS is faster."""

_THREADS, _WARPS = 256, 8
_INPUTS = 512  # at most, of a head


def runs(q: Tensor, weights: LatentWeights[Tensor]) -> bool:
    """Whether the kernels are for so many rows and these matrices."""
    (heads, latent, key), rows = weights.k_up.shape, len(q)
    if q.stride(0) % 4 or q.stride(1) % 4 or q.data_ptr() % 8:
        return False
    fits = heads <= 8 * tile_rows_of(heads) and latent <= _INPUTS and latent % 8 == 0 and key % 8 == 0
    return 0 < rows <= MOST_ROWS and fits and rows * -(-heads // tile_rows_of(heads)) <= MOST_ROWS * 8


def absorb(q: Tensor, weights: LatentWeights[Tensor], out: Tensor) -> None:
    """out[i, h] = q[i, h, : key] · k_up[h]ᵀ: queries of latents."""
    _product(q, weights.k_up, out, None)


def absorb_and_append(
    q: Tensor,
    new: NewLatents[Tensor],
    rotation: Rotation[Tensor],
    weights: LatentWeights[Tensor],
    pages: tuple[Tensor, Tensor | None],
    out: Tensor,
) -> None:
    """`absorb`, and what `latent_append` does without q_scales, in one kernel."""
    of_new = append_arguments(q, new, rotation, *pages)
    heads, features, inputs = weights.k_up.shape
    of_product = (
        q, np.int64(q.stride(0)), np.int32(q.stride(1)), weights.k_up, out, np.int64(out.stride(0)),
        np.int32(out.stride(1)), np.int32(len(q)), np.int32(heads), np.int32(features),
    )  # fmt: skip
    function = _kernel_that_appends(inputs, pages[0].dtype, element_macro(q.dtype))
    launch(function, (heads, 1 + _blocks(features, inputs)), _THREADS, (*of_product, *of_new), 0, True)


def values(
    sums: Tensor,
    weights: LatentWeights[Tensor],
    out: Tensor,
    parts: tuple[PageTable, DecodeWorkspace, Cutting] | None,
) -> None:
    """out[i, h] = sums[i, h] · v_up[h]ᵀ, where `latent_attend` made sums; parts: where it left those that it cut, None
    if it merged them."""
    _product(sums, weights.v_up, out, parts)


def _product(x: Tensor, weight: Tensor, out: Tensor, parts: tuple[PageTable, DecodeWorkspace, Cutting] | None) -> None:
    heads, features, inputs = weight.shape
    partial, kv_lens, cutting = (parts[1].partial, parts[0].kv_lens, parts[2]) if parts else (None, None, Cutting(16))
    arguments = [
        x, np.int64(x.stride(0)), np.int32(x.stride(1)), weight, out, np.int64(out.stride(0)), np.int32(out.stride(1)),
        np.int32(len(x)), np.int32(heads), np.int32(features), partial, kv_lens, np.int32(cutting.rows),
        np.int32(gpu(x.device).multiprocessors), np.int32(cutting.beside), np.int32(cutting.tokens),
        np.int32(cutting.is_sm90),
    ]  # fmt: skip
    function = _kernel(inputs, int(parts is not None), element_macro(x.dtype))
    launch(function, (heads, _blocks(features, inputs)), _THREADS, arguments, 0, True)


def _blocks(features: int, inputs: int) -> int:
    """Returns the thread blocks of a head."""
    return -(-features // ((2 if inputs > 256 else 8) * _WARPS))


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of released models' sizes; others are compiled at their first use."""
    for dtype in HALVES:
        for inputs, merges in ((128, 0), (192, 0), (512, 0), (512, 1)):
            yield _kernel(inputs, merges, element_macro(dtype))
        for inputs, pages in itertools.product((128, 192), (dtype, *PAGES)):
            yield _kernel_that_appends(inputs, pages, element_macro(dtype))


def _kernel(inputs: int, merges: int, kind: dict[str, int]) -> Kernel:
    return kernel("latent/products.cu", "latent_product", INPUTS=inputs, MERGES=merges, **kind)


def _kernel_that_appends(inputs: int, pages: torch.dtype, kind: dict[str, int]) -> Kernel:
    return kernel(
        "latent/products.cu", "absorb_append", APPENDS=1, MERGES=0, INPUTS=inputs, FORMAT=TYPES[pages], **kind
    )
