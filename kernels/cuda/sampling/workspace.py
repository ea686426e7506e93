"""The scratch memory that sampling kernels share, and the checks of their arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, kernel

THREADS, CAPACITY = 512, 8192
GROUP = 16
"""Logits of a group, of which the highest is kept."""


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Scratch memory of one call at a time, for up to `rows` rows; counters are zero before and after each."""

    vocab: int
    rows: int
    threads: int
    capacity: int
    cluster: int
    """Blocks of a row when it is sampled; 0: as many as are good for the number of rows, and of as many threads."""
    kept: int
    """Bytes of its logits that a block keeps at most; 0: what it can."""
    groups: Tensor
    partial: Tensor
    counters: Tensor
    highest: Tensor
    sums: Tensor
    listed_logits: Tensor
    listed_ids: Tensor
    flags: Tensor
    """int32 [rows]: what `change` has seen in the logits of a row."""

    @property
    def parts(self) -> int:
        """Returns the number of parts of a row, each looked at by one thread block."""
        return -(-self.vocab // (self.threads * GROUP))


def sampling_workspace(
    rows: int,
    vocab: int,
    device: torch.device | str,
    threads: int = THREADS,
    capacity: int = CAPACITY,
    cluster: int = 0,
    kept: int = 0,
) -> SamplingWorkspace:
    """Returns a workspace for calls with up to `rows` rows; a row takes about 0.25 * vocab + 66,000 bytes.

    `threads`: of a block; `capacity`: tokens in a list, of which a row draws without going over all its tokens again
    and again; `cluster` and `kept`: see SamplingWorkspace. Raises ValueError for a vocabulary that is too large.
    """
    parts = -(-vocab // (threads * GROUP))
    if not 0 < vocab <= GROUP << 16:
        raise ValueError(f"vocab: {vocab} is not between 1 and {GROUP << 16}")

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    wide, real = torch.int64, torch.float32
    return SamplingWorkspace(
        vocab, rows, threads, capacity, cluster, kept, zeros(rows, parts * threads, dtype=real),
        zeros(rows, parts, dtype=wide), zeros(rows), zeros(rows, dtype=real), zeros(rows, parts, dtype=wide),
        zeros(rows, capacity, dtype=real), zeros(rows, capacity), zeros(rows),
    )  # fmt: skip


def variant(source: str, name: str, threads: int, capacity: int, **macros: int) -> Kernel:
    """Returns the kernel `name` of a source in this folder, compiled for such blocks."""
    return kernel(f"sampling/{source}", name, THREADS=threads, CAPACITY=capacity, **macros)


def columns_of(out: Tensor) -> np.int32:
    """Returns the number of columns of `out`, of which the first is written."""
    return np.int32(1 if out.dim() == 1 else out.shape[1])


def check_rows(logits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> int:
    """Returns the number of rows; raises ValueError for what kernels would read or write past."""
    m, vocab = logits.shape
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits: {logits.dtype} of strides {logits.stride()} is not contiguous float32")
    if m > workspace.rows or vocab != workspace.vocab:
        raise ValueError(f"workspace: made for {workspace.rows} rows of {workspace.vocab}, not for {m} of {vocab}")
    if out.dtype is not torch.int32 or len(out) != m or not out.is_contiguous():
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} is not contiguous int32 for {m} rows")
    return m


def check_ints(name: str, ints: Tensor, count: int) -> None:
    """Raises ValueError unless `ints` is contiguous int32 [count]."""
    if ints.dtype is not torch.int32 or ints.shape != (count,) or not ints.is_contiguous():
        raise ValueError(f"{name}: {ints.dtype} {tuple(ints.shape)} is not contiguous int32 [{count}]")
