"""A token for each row of logits: see sample_rows.cu for the passes, and kernels/reference/sampling.py for what they
compute, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.abi.sampling import SETTINGS
from allspan.kernels.cuda.jit.modules import Gpu, Kernel, gpu, launch
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

CLUSTERS = (1, 2, 4, 8)
"""Blocks that may share a row; more than one on sm_90 and later."""
FEW_THREADS, FEW_BYTES = 256, 64 << 10
"""Threads of blocks of which several run on a multiprocessor, and the most bytes of a row that they keep: three fit."""
MANY_THREADS = 1024
"""Threads of two blocks that share a row: 6 to 28 % faster than half as many, with top-k, top-p or min-p."""

_MEETING_BYTES, _MOST_THREADS = 11264, 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requests that m rows of logits belong to. All int32 [m]."""

    rows: Tensor
    """The row of `settings` that each is drawn by; nothing is written for -1."""
    positions: Tensor
    """Positions of the tokens in their requests."""
    targets: Tensor | None = None
    """Tokens that are known, or -1; None: none is."""


def sample_rows(
    logits: Tensor,
    wanted: Wanted,
    settings: Tensor,
    out: Tensor,
    workspace: SamplingWorkspace,
    is_changed: bool = False,
) -> None:
    """Writes a token for each row of `logits` float32 [m, vocab] into the first column of `out` int32 [m, columns], or
    [m]: what the reference does, of which this has the bits.

    `settings` uint8 [n, 40] are rows of SETTINGS (see kernels/abi/sampling.py). is_changed: `change_rows` came before.

    One launch. Nothing of this is read on the host: a captured graph serves whatever the tensors hold then.
    """
    m = check_rows(logits, out, workspace)
    check_ints("rows", wanted.rows, m)
    check_ints("positions", wanted.positions, m)
    if wanted.targets is not None:
        check_ints("targets", wanted.targets, m)
    if settings.dtype is not torch.uint8 or settings.shape[1:] != (SETTINGS.itemsize,) or not settings.is_contiguous():
        raise ValueError(f"settings: {settings.dtype} {tuple(settings.shape)} is not uint8 [n, {SETTINGS.itemsize}]")
    if not m:
        return
    w, device = workspace, gpu(logits.device)
    cluster, threads = w.cluster, w.threads
    if not cluster:
        cluster, best = blocks_for(m, w.vocab, device)
        threads = best if threads == THREADS else min(threads, best)
    warps = threads // 32
    room = min(w.kept or device.shared_bytes, device.shared_bytes - _MEETING_BYTES)
    stay = min(-(-(w.vocab + 6) // (4 * cluster * warps)), room // (16 * warps))
    shared_bytes = _MEETING_BYTES + stay * warps * 16
    at_once = min(_MOST_THREADS // threads, device.shared_bytes // (shared_bytes + 1024)) * device.multiprocessors
    sizes = [np.int32(w.vocab), np.int32(stay), np.int32(at_once // cluster * cluster)]
    arguments = [
        logits, *sizes, wanted.rows, settings, wanted.positions, wanted.targets, w.flags if is_changed else None,
        w.listed_logits, w.listed_ids, out, columns_of(out),
    ]  # fmt: skip
    what = _kernel(threads, w.capacity, cluster)
    launch(what, (m * cluster,), threads, arguments, shared_bytes, is_early=True)


def blocks_for(rows: int, vocab: int, device: Gpu) -> tuple[int, int]:
    """Returns how many blocks share a row, and their threads.

    There are no more than multiprocessors, if rows are few: what blocks do beside their logits is most of what many
    small ones do.
    """
    if device.capability < (9, 0):
        return 1, THREADS
    most = device.multiprocessors
    cluster = next((count for count in CLUSTERS[1:] if rows * count >= 0.9 * most), CLUSTERS[-1])
    if vocab * 4 <= FEW_BYTES * cluster and rows * cluster >= 3 * most:
        return cluster, FEW_THREADS
    return cluster, MANY_THREADS if cluster == 2 else THREADS


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    if capability < (9, 0):
        yield _kernel(THREADS, CAPACITY, 1)
    else:
        yield from (_kernel(THREADS, CAPACITY, cluster) for cluster in CLUSTERS[1:])
        yield from (_kernel(FEW_THREADS, CAPACITY, cluster) for cluster in CLUSTERS[1:])
        yield _kernel(MANY_THREADS, CAPACITY, 2)


def _kernel(threads: int, capacity: int, cluster: int) -> Kernel:
    return variant("sample_rows.cu", "sample", threads, capacity, CLUSTER=cluster)
