"""The passes over all of a row of logits that finding its most likely tokens begins with: see scan.cu."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, launch
from allspan.kernels.cuda.sampling.workspace import CAPACITY, THREADS, SamplingWorkspace, columns_of, variant

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""


def scan(logits: Tensor, groups: Tensor | None, out: Tensor | None, w: SamplingWorkspace) -> None:
    """Writes the highest logit of each row to `w.highest`, that of each group of 16 to `groups`, its token to `out`."""
    columns = np.int32(0) if out is None else columns_of(out)
    arguments = [logits, np.int32(w.vocab), groups, w.partial, w.counters, w.highest, out, columns]
    launch(_kernel("scan", w.threads, w.capacity), (w.parts, len(logits)), w.threads, arguments, is_early=True)


def weigh(logits: Tensor, w: SamplingWorkspace) -> None:
    """Writes the sum of the weights of each part of each row to `w.sums`; `scan` comes before."""
    arguments = [logits, np.int32(w.vocab), w.groups, w.highest, w.sums]
    launch(_kernel("weigh", w.threads, w.capacity), (w.parts, len(logits)), w.threads, arguments, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    return [_kernel(name, THREADS, CAPACITY) for name in ("scan", "weigh")]


def _kernel(name: str, threads: int, capacity: int) -> Kernel:
    return variant("scan.cu", name, threads, capacity)
