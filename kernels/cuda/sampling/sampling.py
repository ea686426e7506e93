"""Rows of logits to tokens on a GPU: see sampling_row.cu and sampling.cu for the passes, and
kernels/reference/sampling.py for what they compute, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.abi.sampling import SETTINGS
from allspan.kernels.cuda.jit.modules import Gpu, Kernel, gpu, kernel, launch

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_LIKELY = 256
"""So many of the most likely tokens can be asked for."""
THREADS, CAPACITY = 512, 8192
CLUSTERS = (1, 2, 4, 8)
"""Blocks that may share a row; more than one on sm_90 and later."""
FEW_THREADS, FEW_BYTES = 256, 64 << 10
"""Of blocks of which several run on a multiprocessor, and the bytes of a row that they keep at most: three fit."""
MANY_THREADS = 1024
"""Of two blocks that share a row: 6 to 28 % faster than half as many, where a row has top-k, top-p or min-p."""

_GROUP, _MEETING_BYTES, _MOST_THREADS = 16, 11264, 1024


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Scratch of one call at a time, for up to so many rows; counters are zero before and after each."""

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
        """Of a row, each looked at by one thread block."""
        return -(-self.vocab // (self.threads * _GROUP))


def sampling_workspace(
    rows: int,
    vocab: int,
    device: torch.device | str,
    threads: int = THREADS,
    capacity: int = CAPACITY,
    cluster: int = 0,
    kept: int = 0,
) -> SamplingWorkspace:
    """`threads` of a block; `capacity`: tokens in a list, of which a row draws without going over all its tokens again
    and again; `cluster` and `kept`: see SamplingWorkspace. A row takes about 0.25 * vocab + 66,000 bytes. Raises
    ValueError for a vocabulary that is too large."""
    parts = -(-vocab // (threads * _GROUP))
    if not 0 < vocab <= _GROUP << 16:
        raise ValueError(f"vocab: {vocab} is not between 1 and {_GROUP << 16}")

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    wide, real = torch.int64, torch.float32
    return SamplingWorkspace(
        vocab, rows, threads, capacity, cluster, kept, zeros(rows, parts * threads, dtype=real),
        zeros(rows, parts, dtype=wide), zeros(rows), zeros(rows, dtype=real), zeros(rows, parts, dtype=wide),
        zeros(rows, capacity, dtype=real), zeros(rows, capacity), zeros(rows),
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
        _scan(logits, None, out, workspace)


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
    m = _check(logits, out, workspace)
    _check_ints("rows", wanted.rows, m)
    _check_ints("positions", wanted.positions, m)
    if wanted.targets is not None:
        _check_ints("targets", wanted.targets, m)
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
        w.listed_logits, w.listed_ids, out, _columns(out),
    ]  # fmt: skip
    what = _variant("sample", threads, w.capacity, cluster)
    launch(what, (m * cluster,), threads, arguments, shared_bytes, is_early=True)


def blocks_for(rows: int, vocab: int, device: Gpu) -> tuple[int, int]:
    """How many blocks share a row, and their threads. No more than there are multiprocessors, if rows are few: what
    blocks do beside their logits is most of what many small ones do."""
    if device.capability < (9, 0):
        return 1, THREADS
    most = device.multiprocessors
    cluster = next((count for count in CLUSTERS[1:] if rows * count >= 0.9 * most), CLUSTERS[-1])
    if vocab * 4 <= FEW_BYTES * cluster and rows * cluster >= 3 * most:
        return cluster, FEW_THREADS
    return cluster, MANY_THREADS if cluster == 2 else THREADS


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
    _scan(logits, w.groups, None, w)
    launch(_kernel("weigh", w), (w.parts, m), w.threads, [logits, vocab, w.groups, w.highest, w.sums], is_early=True)
    arguments = [
        logits, vocab, np.int32(w.parts), limits, tokens, _columns(tokens), w.groups, w.highest, w.sums,
        np.int32(places), out,
    ]  # fmt: skip
    launch(_kernel("likely", w), (m,), w.threads, arguments, w.capacity * 10, is_early=True)


def _scan(logits: Tensor, groups: Tensor | None, out: Tensor | None, w: SamplingWorkspace) -> None:
    columns = np.int32(0) if out is None else _columns(out)
    arguments = [logits, np.int32(w.vocab), groups, w.partial, w.counters, w.highest, out, columns]
    launch(_kernel("scan", w), (w.parts, len(logits)), w.threads, arguments, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    yield from (_variant(name, THREADS, CAPACITY) for name in ("scan", "weigh", "likely"))
    if capability < (9, 0):
        yield _variant("sample", THREADS, CAPACITY, 1)
    else:
        yield from (_variant("sample", THREADS, CAPACITY, cluster) for cluster in CLUSTERS[1:])
        yield from (_variant("sample", FEW_THREADS, CAPACITY, cluster) for cluster in CLUSTERS[1:])
        yield _variant("sample", MANY_THREADS, CAPACITY, 2)


def _kernel(name: str, workspace: SamplingWorkspace) -> Kernel:
    return _variant(name, workspace.threads, workspace.capacity)


def _variant(name: str, threads: int, capacity: int, cluster: int = 0) -> Kernel:
    stem = {"sample": "sampling_row", "likely": "sampling_likely"}.get(name, "sampling")
    more = {"CLUSTER": cluster} if cluster else {}
    return kernel(f"sampling/{stem}.cu", name, THREADS=threads, CAPACITY=capacity, **more)


def _columns(out: Tensor) -> np.int32:
    return np.int32(1 if out.dim() == 1 else out.shape[1])


def _check(logits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> int:
    """How many rows."""
    m, vocab = logits.shape
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits: {logits.dtype} of strides {logits.stride()} is not contiguous float32")
    if m > workspace.rows or vocab != workspace.vocab:
        raise ValueError(f"workspace: made for {workspace.rows} rows of {workspace.vocab}, not for {m} of {vocab}")
    if out.dtype is not torch.int32 or len(out) != m or not out.is_contiguous():
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} is not contiguous int32 for {m} rows")
    return m


def _check_ints(name: str, ints: Tensor, count: int) -> None:
    if ints.dtype is not torch.int32 or ints.shape != (count,) or not ints.is_contiguous():
        raise ValueError(f"{name}: {ints.dtype} {tuple(ints.shape)} is not contiguous int32 [{count}]")
