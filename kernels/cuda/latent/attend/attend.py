"""Attention over paged latents on a GPU, whose queries are latents, too: see attend.cu, and on Hopper attend_sm90.cu
for many heads and attend_few_sm90.cu for few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.decode import DecodeWorkspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan
from allspan.kernels.cuda.cache.pages import LOG2E, PageTable
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch, shared_limit
from allspan.kernels.cuda.latent.append import check_pages
from allspan.kernels.cuda.latent.attend import attend_few_sm90, attend_sm90, merge

MOST_LATENT, MOST_TURNED, STEP = 512, 64, 16
"""Elements of a latent and of what turns, at most, both in steps of so many."""

PAGE_DTYPES = ("bfloat16", "float16", "int8")
"""Formats of the engine's pages."""

PLAN_QUERIES = 128
"""Queries of a plan's tile."""

_TOKENS, _THREADS = 32, 256
_MOST_ROWS = 64  # of a tile
_MOST_TILES = 8192  # of a launch
_COUNTERS = 1 << 15
_FORMATS = {torch.bfloat16: 0, torch.float16: 0, torch.int8: 1, torch.float8_e4m3fn: 3}


def runs(latent: int, turned: int) -> bool:
    """Whether the kernel is for rows of these sizes."""
    return 0 < latent <= MOST_LATENT and turned <= MOST_TURNED and latent % STEP == turned % STEP == 0


def tile_rows_of(heads: int) -> int:
    """Rows of a tile of requests of one query."""
    return next(rows for rows in (16, 32, 64) if rows >= heads or rows == _MOST_ROWS)


def attend_workspace(latent: int, device: torch.device | str) -> DecodeWorkspace:
    """For latents of this size."""
    floats = gpu(torch.device(device)).multiprocessors * 2 * _MOST_ROWS * (latent + 2)
    partial = torch.empty(floats, dtype=torch.float32, device=device)
    return DecodeWorkspace(partial, torch.zeros(_COUNTERS, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of latents."""

    latents: Tensor
    """[rows, heads, L], of 16 bits, heads one after the other."""
    turned: Tensor
    """[rows, heads, rot], in any strides but the last."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the kernel that is chosen cuts the work of a launch: see cut.cuh."""

    rows: int
    """The number of rows of a tile."""
    tokens: int = _TOKENS
    """The number of tokens of a unit."""
    beside: int = 1
    """The number of tiles that have stretches together."""
    is_sm90: bool = False

    @property
    def is_for_few_heads(self) -> bool:
        """Whether the kernel is attend_few_sm90."""
        return self.is_sm90 and self.rows <= attend_few_sm90.ROWS[-1]


@dataclass(frozen=True, slots=True)
class Mode:
    """What `latent_attend` does otherwise than by default."""

    is_before: bool = False
    """Queries of a plan see the tokens alone that are before all queries of their request."""
    merges: bool = True
    """Else rows whose tokens are cut are left in the workspace, for products.cu."""
    cutting: Cutting | None = None
    """None: as `cutting` chooses."""


def cutting(q: Queries, cache: Tensor, plan: PrefillPlan | None) -> Cutting:
    """Chooses the kernel, by sizes alone."""
    heads = q.latents.shape[1]
    rows = heads * (1 if plan is None else plan.queries // max(1, len(plan.tiles)))
    if not attend_sm90.why_not(q.turned, cache, q.latents.shape[2]):
        if few := attend_few_sm90.tile_rows_of(rows):
            return Cutting(few, attend_sm90.TOKENS, is_sm90=True)
        return Cutting(attend_sm90.ROWS, attend_sm90.TOKENS, attend_sm90.beside(rows), True)
    return Cutting(_MOST_ROWS if plan is not None else tile_rows_of(heads))


def latent_attend(
    q: Queries,
    pages: tuple[Tensor, Tensor | None],
    table: PageTable,
    plan: PrefillPlan | None,
    scale: float,
    into: tuple[Tensor, Tensor | None],
    workspace: DecodeWorkspace,
    mode: Mode = Mode(),
) -> None:
    """out[i, h] = the sum of the latents that query i sees, weighted by their softmax; none: zeros.

    pages: the cache of `OpSet.latent_append` and its scales. Without a plan every request has one query, which is its
    last token: row r of q and out, or `table.rows[r]`, where -1 leaves it out. A plan has groups of one head. into:
    out [rows, heads, L] and None or float32 lse [rows, heads]: logarithms to base 2 of the sums of the powers of e.
    Lengths are read on the GPU alone, so a captured graph serves other ones. Where a request is cut depends on others.
    """
    out, lse = into
    cache, scales = pages
    latent, turned = q.latents.shape[2], q.turned.shape[2]
    _rows, heads = _check(q, pages, into)
    count = len(table.kv_lens) if plan is None else len(plan.tiles)
    cut = mode.cutting or cutting(q, cache, plan)
    of_each = -(-heads * (1 if plan is None else PLAN_QUERIES) // (cut.rows * cut.beside))
    device = gpu(q.latents.device)
    shape = _shape((latent, turned), cut.rows, _FORMATS[cache.dtype], device.shared_bytes)
    if workspace.partial.numel() < device.multiprocessors * 2 * cut.rows * (latent + 2):
        raise ValueError(f"workspace: not made for latents of {latent}")
    lines_up = plan is None and table.rows is None  # rows of q and out are the requests'
    merges_later = mode.merges and lines_up and merge.pays(count * of_each, device.multiprocessors // cut.beside)
    each = (len(workspace.counters) // cut.beside if cut.is_sm90 else shape.most_tiles) // of_each
    for first in range(0, count, each):
        some = min(each, count - first)
        part = slice(first, first + some)
        cut_tiles = (plan.tiles[part], plan.qo_indptr) if plan else (None, None)
        lens, indptr = (table.kv_lens, table.indptr) if plan else (table.kv_lens[part], table.indptr[first:])
        places = table.rows[part] if plan is None and table.rows is not None else None
        if plan is None and places is None and first:
            raise ValueError(f"table: {count} requests, more than {each}, need rows")
        lines = [
            *cut_tiles, places, lens, np.int32(some * of_each), np.int32(of_each), np.int32(heads),
            np.int32(mode.is_before), indptr, table.indices,
        ]  # fmt: skip
        held = [out, lse, workspace.partial, workspace.counters, np.int32(mode.merges and not merges_later)]
        if cut.is_sm90:
            _launch_sm90(cut, q, cache, lines, held, scale * LOG2E, some)
            continue
        strides = [np.int64(cache.stride(i) * cache.element_size()) for i in (0, 2)]  # of pages and of tokens, bytes
        arguments = [
            q.latents, np.int64(q.latents.stride(0)), q.turned, np.int64(q.turned.stride(0)),
            np.int32(q.turned.stride(1)), cache, scales, *strides, *lines,
            np.int32(cache.shape[2].bit_length() - 1), np.float32(scale * LOG2E), *held,
        ]  # fmt: skip
        function = _kernel((latent, turned), shape, element_macro(q.latents.dtype))
        launch(function, (device.multiprocessors,), _THREADS, arguments, shape.shared + 4 * (some * of_each + 1), True)
    if merges_later:
        how = cut.rows, device.multiprocessors, cut.beside, cut.tokens, int(cut.is_sm90)
        merge.merge_rows(out[:count], None if lse is None else lse[:count], workspace.partial, table.kv_lens, how)


def _launch_sm90(
    cut: Cutting, q: Queries, cache: Tensor, lines: list[Any], into: list[Any], scale: float, requests: int
) -> None:
    both = q.latents, q.turned
    if cut.rows == attend_sm90.ROWS:
        attend_sm90.launch_sm90(both, cache, lines, into, scale, cut.beside)
    else:
        attend_few_sm90.launch_few_sm90(both, cache, lines, into, scale, cut.rows, requests)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of released models' sizes; others are compiled at their first use."""
    limit, sizes = shared_limit(capability), (MOST_LATENT, MOST_TURNED)
    for tile_rows in (16, 32, 64):
        for dtype, form in _FORMATS.items():
            yield _kernel(sizes, _shape(sizes, tile_rows, form, limit), element_macro(dtype))


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    stages: int
    form: int
    shared: int
    """Bytes, without what there is for each tile."""
    most_tiles: int


def _shape(sizes: tuple[int, int], rows: int, form: int, limit: int) -> _Shape:
    """Returns a shape with as many stages, up to 6, as there is room for."""
    width = sum(sizes)
    tile = _TOKENS * (-(-width * 2 // 128) * 128)
    stage = _TOKENS * (width + 8) if form else tile
    queries = rows * (tile // _TOKENS) if rows == _MOST_ROWS else 0
    score_row = _TOKENS + (4 if rows == _MOST_ROWS else 8)
    fixed = (tile if form else 0) + queries + rows * (4 * score_row * 4 + _TOKENS * 2 + 16 + 4 + 8)
    left = limit - fixed - 256  # what the kernel has beside, and the end of the line
    stages = max(2, min(6, (left - 4096) // stage))
    most = (left - stages * stage) // 4
    return _Shape(rows, stages, form, fixed + stages * stage, min(_MOST_TILES, most))


def _kernel(sizes: tuple[int, int], shape: _Shape, kind: dict[str, int]) -> Kernel:
    return kernel(
        "latent/attend/attend.cu", "attend",
        LATENT=sizes[0], TURNED=sizes[1], ROWS=shape.rows, STAGES=shape.stages, FORMAT=shape.form, **kind,
    )  # fmt: skip


def _check(q: Queries, pages: tuple[Tensor, Tensor | None], into: tuple[Tensor, Tensor | None]) -> tuple[int, int]:
    """Rows and heads. Raises ValueError for tensors that the kernel would read or write past."""
    out, lse = into
    rows, heads, latent = q.latents.shape
    turned = q.turned.shape[2]
    if not runs(latent, turned):
        raise ValueError(f"q: latents of {latent} and {turned} that turn are not in steps of {STEP} up to {MOST_LATENT}"
                         f" and {MOST_TURNED}")  # fmt: skip
    if q.latents.dtype not in HALVES or not q.latents.is_contiguous():
        raise ValueError(f"q: {q.latents.dtype} {q.latents.stride()} is not contiguous and of 16 bits")
    if q.turned.dtype is not q.latents.dtype or q.turned.shape[:2] != (rows, heads) or q.turned.stride(2) != 1:
        raise ValueError(f"turned: {q.turned.dtype} {tuple(q.turned.shape)} does not go with {(rows, heads)}")
    if any(x % 2 for x in (*q.turned.stride()[:2], q.turned.storage_offset())):
        raise ValueError(f"turned: strides {q.turned.stride()} are odd")
    if out.dtype is not q.latents.dtype or out.shape != q.latents.shape or not out.is_contiguous():
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} must be as q {tuple(q.latents.shape)}, contiguous")
    if lse is not None and (lse.dtype is not torch.float32 or lse.shape != (rows, heads) or not lse.is_contiguous()):
        raise ValueError(f"lse: {lse.dtype} {tuple(lse.shape)} is not contiguous float32 {(rows, heads)}")
    cache, scales = pages
    check_pages(cache, scales, latent + turned, q.latents.dtype)
    if cache.data_ptr() % 16 or any(cache.stride(i) * cache.element_size() % 16 for i in (0, 2)):
        raise ValueError(f"cache: strides {cache.stride()} of {cache.dtype} are no multiples of 16 bytes")
    return rows, heads
