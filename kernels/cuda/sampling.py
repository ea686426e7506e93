"""Rows of logits to tokens on a GPU: see sampling.cu for the passes, and worker/sampling/reference.py for what they
compute, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.modules import Kernel, kernel, launch

SETTINGS_BYTES = 40
"""Of a row of settings, laid out as in worker/sampling/settings.py."""
MOST_LIKELY = 256
"""So many of the most likely tokens can be asked for."""
THREADS, CAPACITY = 512, 8192

_GROUP, _BINS, _CUT_BYTES = 16, 512, 24


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Scratch of one call at a time, for up to so many rows; counters and counts are zero before and after each."""

    vocab: int
    rows: int
    threads: int
    capacity: int
    groups: Tensor
    partial: Tensor
    counters: Tensor
    highest: Tensor
    modes: Tensor
    sums: Tensor
    bins: Tensor
    cuts: Tensor
    tokens: Tensor
    counts: Tensor
    flags: Tensor
    """int32 [rows]: what `change` has seen in the logits of a row."""

    @property
    def parts(self) -> int:
        """Of a row, each looked at by one thread block."""
        return -(-self.vocab // (self.threads * _GROUP))


def sampling_workspace(
    rows: int, vocab: int, device: torch.device | str, threads: int = THREADS, capacity: int = CAPACITY
) -> SamplingWorkspace:
    """`threads` of a block look at 16 logits each; `capacity`: so many tokens fit into what a block draws from at once,
    more are gone over in global memory. A row takes about 0.75 * vocab + 33,000 bytes. Raises ValueError for a
    vocabulary that is too large."""
    parts = -(-vocab // (threads * _GROUP))
    most = min(_BINS * threads * _GROUP, _GROUP << 16)
    if not 0 < vocab <= most:
        raise ValueError(f"vocab: {vocab} is not between 1 and {most}")

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    wide, real = torch.int64, torch.float32
    return SamplingWorkspace(
        vocab, rows, threads, capacity, zeros(rows, parts * threads, dtype=real), zeros(rows, parts, dtype=wide),
        zeros(rows), zeros(rows, dtype=real), zeros(rows), zeros(rows, parts, dtype=wide),
        zeros(rows, parts, _BINS, dtype=wide), zeros(rows, _CUT_BYTES, dtype=torch.uint8),
        zeros(rows, capacity // 2, 2, dtype=real), zeros(rows), zeros(rows),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """What m rows of logits are for. All int32 [m]."""

    rows: Tensor
    """Whose settings each is drawn by; nothing is written for -1."""
    positions: Tensor
    """Of the tokens, in their requests."""
    targets: Tensor | None = None
    """Tokens that are known, or -1; None: none is."""


def best_tokens(logits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> None:
    """out[i] = the most likely token of logits[i], of equals the first; -1 where a logit is NaN or +inf; else -2 where
    all are -inf. logits: float32 [m, vocab]; out: int32 [m] or [m, columns], of which the first is written.

    Raises ValueError for what does not fit, as all functions here do, and BackendUnavailable without CuPy."""
    m = _check(logits, out, workspace)
    if m:
        _scan(logits, None, None, out, workspace, is_changed=False)


def sample_rows(
    logits: Tensor,
    wanted: Wanted,
    settings: Tensor,
    out: Tensor,
    workspace: SamplingWorkspace,
    is_changed: bool = False,
    needs_totals: bool = True,
) -> None:
    """Writes a token for each row of `logits` float32 [m, vocab] into the first column of `out` int32 [m, columns], or
    [m]: what the reference does, of which this has the bits.

    `settings` uint8 [n, 40] are laid out as in worker/sampling/settings.py. is_changed: `change_rows` came before.
    needs_totals: False promises that all rows are greedy, known or drawn from their top-k, which takes fewer launches.

    Nothing of this is read on the host: a captured graph serves whatever the tensors hold then.
    """
    m = _check(logits, out, workspace)
    _check_ints("rows", wanted.rows, m)
    _check_ints("positions", wanted.positions, m)
    if wanted.targets is not None:
        _check_ints("targets", wanted.targets, m)
    if settings.dtype is not torch.uint8 or settings.shape[1:] != (SETTINGS_BYTES,) or not settings.is_contiguous():
        raise ValueError(f"settings: {settings.dtype} {tuple(settings.shape)} is not uint8 [n, {SETTINGS_BYTES}]")
    if not m:
        return
    w, vocab, grid = workspace, np.int32(workspace.vocab), (workspace.parts, m)
    _scan(logits, wanted, settings, out, w, is_changed)
    shared = [logits, vocab, wanted.rows, settings, w.groups, w.highest, w.modes]
    if needs_totals:
        launch(_kernel("weigh", w), grid, w.threads, [*shared, w.counters, w.sums, w.bins, w.cuts], is_early=True)
        launch(
            _kernel("narrow", w), grid, w.threads, [*shared, w.bins, w.cuts, w.sums, w.tokens, w.counts], is_early=True
        )
    arguments = [
        logits, vocab, np.int32(w.parts), wanted.rows, settings, wanted.positions, w.groups, w.highest, w.modes, w.sums,
        w.cuts, w.tokens, w.counts, out, _columns(out),
    ]  # fmt: skip
    launch(_kernel("draw", w), (m,), w.threads, arguments, w.capacity * 10, is_early=True)


def likely_tokens(logits: Tensor, tokens: Tensor, limits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> None:
    """What log-probabilities are made of, for each row of `logits` float32 [m, vocab] with limits[m] >= 0 and a token,
    tokens[:, 0] >= 0: out int32 [m, 4 + 2 * places] gets the sum of all weights in units of 2**(b - 53), b the bits of
    vocab, as the low and the high word; the bits of the highest logit and of the token's; the ids of the limits[m] most
    likely tokens, best first, of equals the lowest first; the bits of their logits, after all places."""
    m = _check(logits, tokens, workspace)
    _check_ints("limits", limits, m)
    places = (out.shape[1] - 4) // 2
    if out.dtype is not torch.int32 or len(out) != m or not out.is_contiguous() or not 0 <= places <= MOST_LIKELY:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} is not int32 [{m}, 4 + 2 * at most {MOST_LIKELY}]")
    if not m:
        return
    w, vocab = workspace, np.int32(workspace.vocab)
    _scan(logits, None, None, None, w, is_changed=False)
    arguments = [logits, vocab, None, None, w.groups, w.highest, w.modes, w.counters, w.sums, w.bins, w.cuts]
    launch(_kernel("weigh", w), (w.parts, m), w.threads, arguments, is_early=True)
    arguments = [
        logits, vocab, np.int32(w.parts), limits, tokens, _columns(tokens), w.groups, w.highest, w.sums,
        np.int32(places), out,
    ]  # fmt: skip
    launch(_kernel("likely", w), (m,), w.threads, arguments, w.capacity * 10, is_early=True)


def _scan(
    logits: Tensor,
    wanted: Wanted | None,
    settings: Tensor | None,
    out: Tensor | None,
    w: SamplingWorkspace,
    is_changed: bool,
) -> None:
    arguments = [
        logits, np.int32(w.vocab), wanted and wanted.rows, settings, wanted and wanted.targets,
        w.flags if is_changed else None, w.groups, w.partial, w.counters, w.highest, w.modes, out,
        np.int32(0) if out is None else _columns(out),
    ]  # fmt: skip
    launch(_kernel("scan", w), (w.parts, len(logits)), w.threads, arguments)


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    return [_variant(name, THREADS, CAPACITY) for name in ("scan", "weigh", "narrow", "draw", "likely")]


def _kernel(name: str, workspace: SamplingWorkspace) -> Kernel:
    return _variant(name, workspace.threads, workspace.capacity)


def _variant(name: str, threads: int, capacity: int) -> Kernel:
    file = "sampling_draw.cu" if name in ("draw", "likely") else "sampling.cu"
    return kernel(file, name, THREADS=threads, CAPACITY=capacity)


def _columns(out: Tensor) -> np.int32:
    return np.int32(1 if out.dim() == 1 else out.shape[1])


def _check(logits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> int:
    """How many rows."""
    m, vocab = logits.shape
    if logits.dtype is not torch.float32 or not logits.is_contiguous() or logits.data_ptr() % 16:
        raise ValueError(f"logits: {logits.dtype} {logits.stride()} is not contiguous float32, aligned to 16 bytes")
    if m > workspace.rows or vocab != workspace.vocab:
        raise ValueError(f"workspace: made for {workspace.rows} rows of {workspace.vocab}, not for {m} of {vocab}")
    if out.dtype is not torch.int32 or len(out) != m or not out.is_contiguous():
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} is not contiguous int32 for {m} rows")
    return m


def _check_ints(name: str, ints: Tensor, count: int) -> None:
    if ints.dtype is not torch.int32 or ints.shape != (count,) or not ints.is_contiguous():
        raise ValueError(f"{name}: {ints.dtype} {tuple(ints.shape)} is not contiguous int32 [{count}]")
