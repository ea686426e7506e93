"""Attention of a batch that shares tokens: those once for all who share them, as prefill, the rest as decode.

The states are merged after (Z. Ye et al., "Cascade Inference", flashinfer.ai, 2024; J. Juravsky et al., Hydragen,
arXiv:2402.05099): `merge_state` and `merge_states` are as FlashInfer has them, logarithms to base 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.decode import DecodeWorkspace, decode_workspace, paged_decode
from allspan.kernels.cuda.attention.prefill import PrefillPlan, attend, check_plan, cut_rows
from allspan.kernels.cuda.attention.prefill_sm90 import CAPABILITY, attend_sm90, why_not
from allspan.kernels.cuda.cache.pages import QUERIES, Cache, PageTable, Scores, check_rows, kv_of
from allspan.kernels.cuda.jit.modules import Kernel, element_macro, gpu, kernel, launch

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_THREADS = 256
MOST_PARTS = 8
_LEAST_PART = 512  # tokens; shorter ones cost more to merge than they gain


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """Tokens that are shared. The table's requests are groups of neighbouring rows: group g, whose tokens it lists, is
    rows plan.qo_indptr[g] … plan.qo_indptr[g + 1] - 1. Every row is in a group; one of 0 tokens shares nothing."""

    table: PageTable
    plan: PrefillPlan
    parts: int
    """In so many the tokens of each group are cut, so that all of the GPU works: see `parts_of`."""


@dataclass(frozen=True, slots=True)
class CascadeWorkspace:
    """Scratch of one call at a time."""

    states: Tensor
    state_lse: Tensor
    lse: Tensor
    decode: DecodeWorkspace


def cascade_workspace(
    rows: int, heads: tuple[int, int], head_dim: int, parts: int, device: torch.device | str
) -> CascadeWorkspace:
    """For up to so many rows, query and KV heads, and parts of all levels together."""
    count = parts * rows * heads[0]
    return CascadeWorkspace(
        torch.empty(count * head_dim, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(rows * heads[0], dtype=torch.float32, device=device),
        decode_workspace(rows, heads[1], head_dim, device),
    )


def plan_level(
    groups: Sequence[tuple[int, int]], group: int, kv_heads: int, device: torch.device | str
) -> tuple[PrefillPlan, int]:
    """The plan and the parts of a level, of groups (rows, shared tokens); `group` query heads read a KV head, or
    fewer."""
    rows, tokens = (np.array([one[i] for one in groups], np.int32) for i in range(2))
    tiles = cut_rows(rows, tokens, group)
    indptr = np.cumsum([0, *rows], dtype=np.int32)
    plan = PrefillPlan(torch.from_numpy(tiles).to(device), torch.from_numpy(indptr).to(device), int(rows.sum()), group)
    return plan, parts_of(len(tiles) * kv_heads, int(tokens.max(initial=0)), torch.device(device))


def parts_of(blocks: int, tokens: int, device: torch.device) -> int:
    """In how many parts the shared tokens are cut so that `blocks` for each part leave little of the GPU idle."""
    this = gpu(device)
    slots = this.multiprocessors * (1 if this.capability == CAPABILITY else 2)
    most = max(1, min(MOST_PARTS, tokens // _LEAST_PART))
    return min(range(1, most + 1), key=lambda parts: (-(-blocks * parts // slots) / parts, parts))


def paged_cascade(
    q: Tensor,
    cache: Cache,
    levels: Sequence[CascadeLevel],
    own: PageTable,
    scale: Scores | float,
    out: Tensor,
    lse: Tensor | None,
    workspace: CascadeWorkspace,
) -> None:
    """`paged_decode` over each row's tokens of every level and its own; row i is request i of `own`, which has no
    `rows`, and may have no token of its own.

    A row's tokens are those of the levels in their order, then its own: slopes go by these places. For captured graphs
    as `paged_decode`, as long as plans and parts stay. Raises ValueError for what does not fit and for a sliding
    window, BackendUnavailable without CuPy.
    """
    kv, scores = kv_of(cache, q.shape[2]), Scores.of(scale)
    rows, heads, dim = out.shape
    if scores.window_left >= 0:
        raise ValueError(f"scale: a window of {scores.window_left} tokens; a level is seen by its rows as a whole")
    if own.rows is not None:
        raise ValueError("own: rows are given; row i is request i")
    parts = sum(level.parts for level in levels)
    if workspace.lse.numel() < rows * heads or workspace.states.numel() < parts * rows * heads * dim:
        raise ValueError(f"workspace: not made for {parts} parts of {rows} rows x {heads} heads of {dim}")
    states = workspace.states[: parts * rows * heads * dim].view(parts, rows, heads, dim)
    state_lse = workspace.state_lse[: parts * rows * heads].view(parts, rows, heads)
    lse = workspace.lse[: rows * heads].view(rows, heads) if lse is None else lse
    scores.check(heads)
    of_part = replace(scores, sinks=None) if levels else scores
    run = attend_sm90 if gpu(q.device).capability == CAPABILITY and not why_not(kv, dim) else attend
    done = 0
    for level, after in zip(levels, _after(levels, own, scores), strict=True):
        check_rows(q, kv.heads, level.table, out, None)
        check_plan(level.plan, q, kv.heads, level.table, out)
        into = states[done : done + level.parts], state_lse[done : done + level.parts]
        run(q, kv, level.table, level.plan, of_part, False, into, after)
        done += level.parts
    paged_decode(q, cache, own, of_part, out, lse, workspace.decode)
    if parts:
        _merge((states, state_lse), (rows * heads, heads), (out, lse), (out, lse), scores.sinks)


def _after(levels: Sequence[CascadeLevel], own: PageTable, scores: Scores) -> list[Tensor | None]:
    """For each level how many tokens of each row come after its own; None where nothing asks for places."""
    if scores.slopes is None:
        return [None] * len(levels)
    after = [own.kv_lens]
    for level in reversed(levels[1:]):
        rows = torch.arange(len(own.kv_lens), dtype=torch.int32, device=own.kv_lens.device)
        group = torch.searchsorted(level.plan.qo_indptr, rows, right=True) - 1
        after.append(after[-1] + level.table.kv_lens[group])
    return [*reversed(after)] if levels else []


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state of what two saw, of v [n, heads, head_dim] (float32 or of 16 bits) and s float32 [n, heads] each."""
    out, lse = torch.empty_like(v_a), torch.empty_like(s_a)
    _check(v_a, s_a)
    _check(v_b, s_b)
    if v_a.shape != v_b.shape or v_a.dtype is not v_b.dtype:
        raise ValueError(f"v_b: {v_b.dtype} {tuple(v_b.shape)} is not {v_a.dtype} {tuple(v_a.shape)}, as v_a is")
    _merge((v_b[None], s_b[None]), (0, v_a.shape[1]), (v_a, s_a), (out, lse))
    return out, lse


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, sinks: Tensor | None = None) -> None:
    """`merge_state` into the first one; with sinks (`Scores.sinks`) these join what is merged last."""
    _check(v, s)
    _check(v_other, s_other)
    if v.shape != v_other.shape or v.dtype is not v_other.dtype:
        raise ValueError(f"v_other: {v_other.dtype} {tuple(v_other.shape)} is not {v.dtype} {tuple(v.shape)}, as v is")
    if sinks is not None:
        Scores(1.0, sinks=sinks).check(v.shape[1])
    _merge((v_other[None], s_other[None]), (0, v.shape[1]), (v, s), (v, s), sinks)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the states v [n, states, heads, head_dim], float32 or of 16 bits, with s float32 [n, states, heads]."""
    _check(v, s)
    n, states, heads, dim = v.shape
    out, lse = v.new_empty(n, heads, dim), s.new_empty(n, heads)
    _merge((v.transpose(0, 1), s.transpose(0, 1)), (heads, states * heads), None, (out, lse))
    return out, lse


def _check(v: Tensor, s: Tensor) -> None:
    if v.dtype not in (*QUERIES, torch.float32) or v.shape[-1] % 8 or not v.is_contiguous():
        kinds = "bfloat16, float16 or float32"
        raise ValueError(f"v: {v.dtype} {tuple(v.shape)} is not contiguous {kinds}, of 8 elements at a time")
    if s.dtype is not torch.float32 or s.shape != v.shape[:-1] or not s.is_contiguous():
        raise ValueError(f"s: {s.dtype} {tuple(s.shape)} is not contiguous float32 {tuple(v.shape[:-1])}")


def _merge(
    states: tuple[Tensor, Tensor],
    strides: tuple[int, int],
    own: tuple[Tensor, Tensor] | None,
    into: tuple[Tensor, Tensor],
    sinks: Tensor | None = None,
) -> None:
    """states: v [states, rows, heads, dim] and s; strides: from state to state and from row to row, in heads."""
    v, s = states
    out, lse = into
    rows, heads, dim = out.shape
    if out.numel() == 0:
        return
    blocks = -(-rows * heads // (_THREADS // (dim // 8)))
    arguments = [
        v, s, *map(np.int64, strides), np.int32(len(v)), *(own or (None, None)), out, lse, np.int32(rows),
        np.int32(heads), np.int32(dim), sinks,
    ]  # fmt: skip
    launch(_kernel(v.dtype, out.dtype), (blocks,), _THREADS, arguments, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    yield from (_kernel(torch.float32, dtype) for dtype in QUERIES)
    yield _kernel(torch.float32, torch.float32)
    for dtype in QUERIES:
        yield _kernel(dtype, dtype)


def _kernel(of: torch.dtype, into: torch.dtype) -> Kernel:
    is_wide = {"WIDE_IN": int(of is torch.float32), "WIDE_OUT": int(into is torch.float32)}
    return kernel("attention/cascade.cu", "merge_states", **is_wide, **element_macro(of, into))
