"""The most likely tokens of rows of logits, and what log-probabilities are made of: see likely_tokens.cu."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, launch
from allspan.kernels.cuda.sampling.scan import scan, weigh
from allspan.kernels.cuda.sampling.workspace import (
    CAPACITY,
    THREADS,
    SamplingWorkspace,
    check_ints,
    check_rows,
    columns_of,
    variant,
)

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_LIKELY = 256
"""The largest number of most likely tokens that can be asked for."""


def likely_tokens(logits: Tensor, tokens: Tensor, limits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> None:
    """Writes what log-probabilities are made of, for each row of `logits` float32 [m, vocab] with limits[m] >= 0 and a
    token, tokens[:, 0] >= 0.

    out int32 [m, 4 + 2 * places] gets the sum of all weights in units of 2**(b - 53), b the bits of vocab, as the low
    and the high word; the bits of the highest logit and of the token's; the ids of the limits[m] most likely tokens,
    best first, of equals the lowest first; the bits of their logits, after all places.
    """
    m = check_rows(logits, tokens, workspace)
    check_ints("limits", limits, m)
    places = (out.shape[1] - 4) // 2
    if out.dtype is not torch.int32 or len(out) != m or not out.is_contiguous() or not 0 <= places <= MOST_LIKELY:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} is not int32 [{m}, 4 + 2 * at most {MOST_LIKELY}]")
    if not m:
        return
    w, vocab = workspace, np.int32(workspace.vocab)
    scan(logits, w.groups, None, w)
    weigh(logits, w)
    arguments = [
        logits, vocab, np.int32(w.parts), limits, tokens, columns_of(tokens), w.groups, w.highest, w.sums,
        np.int32(places), out,
    ]  # fmt: skip
    launch(_kernel(w.threads, w.capacity), (m,), w.threads, arguments, w.capacity * 10, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    return [_kernel(THREADS, CAPACITY)]


def _kernel(threads: int, capacity: int) -> Kernel:
    return variant("likely_tokens.cu", "likely", threads, capacity)
