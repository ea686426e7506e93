"""Attention of any number of queries for each of many requests over paged latents (DeepSeek-V2's multi-head latent
attention, arXiv:2405.04434, absorbed form), on a GPU or a CPU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.cuda.attention.decode import DecodeWorkspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan, cut_rows
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.latent.attend.attend import Mode, Queries, attend_workspace, latent_attend
from allspan.kernels.library.arrays import Array, anywhere, ints, latent_pages, latent_scales, outputs, tensor
from allspan.kernels.library.run import Result
from allspan.kernels.ops import OpSet
from allspan.kernels.reference.latent import log_sums
from allspan.kernels.table import BACKENDS, op_set

_AFTER_PAGE_SIZE = ("causal", "sm_scale", "q_data_type", "kv_data_type", "use_profiler")
_IGNORED = ("q_data_type", "kv_data_type", "use_profiler", "profiler_buffer")
"""How FlashInfer computes, not what: dtypes are those of the tensors."""

_QUERIES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of queries on CPUs."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Step:
    """What plan was given, on the wrapper's device, and counts of queries and tokens on the host."""

    qo_indptr: Tensor
    table: PageTable
    counts: Ints
    lengths: Ints
    heads: int
    sizes: tuple[int, int]
    """Elements of a latent, and of what turns."""
    page_size: int
    is_causal: bool
    scale: float


class BatchMLAPagedAttentionWrapper:
    """plan for a step's page table, run for each layer: queries are those of latents, as q_nope · k_upᵀ makes them, and
    so are the outputs, which v_up multiplies afterwards (see `OpSet.latent_attention`)."""

    def __init__(
        self,
        float_workspace_buffer: Array,
        use_cuda_graph: bool = False,
        qo_indptr: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        kv_len_arr: Array | None = None,
        backend: str = "auto",
    ) -> None:
        """Takes only the device of float_workspace_buffer. use_cuda_graph: for one query a request, of a fixed number
        of them; plans are put into kv_indptr int32 [requests + 1], kv_indices [most pages] and kv_len_arr [requests].

        backend: one of allspan's ("cuda", "cpu", "cpu/avx2", "reference", …); any other name, such as FlashInfer's:
        the fastest on that device."""
        buffer = anywhere("float_workspace_buffer", float_workspace_buffer)
        is_ours = backend.partition("/")[0] in BACKENDS
        self._backend = backend if is_ours else "auto" if buffer.device.type == "cpu" else "cuda"
        self._run_on: _Gpu | _Cpu | None = None
        self._device = buffer.device
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if self._backend == "cuda":
            tensor("float_workspace_buffer", buffer)
        if use_cuda_graph:
            self._buffers = self._graph_buffers((kv_indptr, kv_indices, kv_len_arr))

    def _graph_buffers(self, given: tuple[Array | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
        if self._backend != "cuda":
            raise ValueError(f"use_cuda_graph: backend {self._backend!r} on {self._device} has no graphs; leave it out")
        held = []
        for name, buffer in zip(("kv_indptr", "kv_indices", "kv_len_arr"), given, strict=True):
            if not isinstance(buffer, Tensor) or (found := ints(name, buffer, self._device)).data_ptr() != (
                buffer.data_ptr()
            ):
                raise ValueError(f"{name}: use_cuda_graph needs it; give contiguous int32 on {self._device}")
            held.append(found)
        return held[0], held[1], held[2]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._buffers is not None

    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        kv_indices: Array,
        kv_len_arr: Array,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        *rest: Any,
        **options: Any,
    ) -> None:
        """Request r has queries qo_indptr[r] … qo_indptr[r + 1] - 1, pages kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
        and kv_len_arr[r] tokens in them. rest, or by name: causal (the last query is the last token, and none sees what
        comes after it), sm_scale, and dtypes, which nothing depends on: those of the tensors count.

        Waits for the GPU. Raises ValueError for what does not fit, TypeError for unknown arguments and without
        sm_scale."""
        given = dict(zip(_AFTER_PAGE_SIZE, rest, strict=False)) | options
        is_causal, scale = bool(given.pop("causal", False)), given.pop("sm_scale", None)
        strange = sorted(set(given) - set(_IGNORED))
        if strange or len(rest) > len(_AFTER_PAGE_SIZE):
            raise TypeError(f"plan: there is no argument {strange[0] if strange else rest[-1]!r}")
        if scale is None:
            raise TypeError("plan: sm_scale is wanted; it is 1 / sqrt(key elements that do not turn + those that do)")
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        starts, *table = (
            ints(name, x, self._device)
            for name, x in zip(names, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True)
        )
        sizes = head_dim_ckv, head_dim_kpe
        if min(num_heads, *sizes, page_size) < 1:
            numbers = f"{num_heads}, {head_dim_ckv}, {head_dim_kpe} and {page_size}"
            raise ValueError(
                f"num_heads, head_dim_ckv, head_dim_kpe, page_size: {numbers} are given, at least 1 is wanted of each"
            )
        counts, lengths = _checked(starts, *table, page_size=page_size)
        step = _Step(
            starts, self._placed(*table), counts, lengths, num_heads, sizes, page_size, is_causal, float(scale)
        )
        if self._backend != "cuda":
            self._run_on = _Cpu(step, _ops(self._backend, torch.get_num_threads()))
            return
        if self._buffers is not None and (counts != 1).any():
            raise ValueError("qo_indptr: use_cuda_graph takes one query a request; use a wrapper without for others")
        held = self._run_on.workspace if isinstance(self._run_on, _Gpu) and self._run_on.step.sizes == sizes else None
        self._run_on = _Gpu(step, held or attend_workspace(head_dim_ckv, self._device))

    begin_forward = plan

    def _placed(self, indptr: Tensor, indices: Tensor, lengths: Tensor) -> PageTable:
        if self._buffers is None:
            return PageTable(indptr, indices, lengths)
        if len(indptr) != len(self._buffers[0]) or len(indices) > len(self._buffers[1]):
            made_for = f"{len(self._buffers[2])} requests and up to {len(self._buffers[1])} pages"
            raise ValueError(f"kv_indptr: {len(lengths)} requests, {len(indices)} pages; buffers are for {made_for}")
        for buffer, found in zip(self._buffers, (indptr, indices, lengths), strict=True):
            buffer[: len(found)].copy_(found)
        return PageTable(*self._buffers)

    def run(
        self,
        q_nope: Array,
        q_pe: Array,
        ckv_cache: Array,
        kpe_cache: Array | None = None,
        *,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Result:
        """q_nope [rows, heads, head_dim_ckv], absorbed, and q_pe [rows, heads, head_dim_kpe]: 16 bits on GPUs, these or
        float32 on CPUs. Caches: see `latent_pages`. Of int8 and float8_e4m3fn pages, scales float32 [pages, 1, 2,
        page_size]: zeros, then scales, as `append_paged_mla_kv_cache` writes them.

        Returns out as q_nope, with return_lse=True also float32 [rows, heads]: logarithms to base 2, or with
        return_lse_base_on_e=True to base e, of the sums of the powers of e. A query that sees no token has zeros and
        -inf. Raises ValueError for other sizes than plan's, RuntimeError without a plan, TypeError for unknown
        arguments."""
        if self._run_on is None:
            raise RuntimeError("run: there is no plan; call plan first")
        is_natural, scales = bool(options.pop("return_lse_base_on_e", False)), options.pop("scales", None)
        if strange := sorted(set(options) - set(_IGNORED)):
            raise TypeError(f"run: there is no argument {strange[0]!r}")
        step = self._run_on.step
        q = anywhere("q_nope", q_nope), anywhere("q_pe", q_pe)
        for name, x, size in zip(("q_nope", "q_pe"), q, step.sizes, strict=True):
            if x.shape != (wanted := (int(step.counts.sum()), step.heads, size)):
                raise ValueError(f"{name}: {tuple(x.shape)} is not plan's {wanted}")
        cache = latent_pages(ckv_cache, kpe_cache, step.sizes)
        if cache.shape[2] != step.page_size:
            raise ValueError(f"ckv_cache: pages of {cache.shape[2]} tokens are not plan's {step.page_size}")
        into = _outputs(q[0], out, lse, return_lse)
        self._run_on.attend(*q, (cache, latent_scales(scales, cache)), into)
        if into[1] is None:
            return into[0]
        return into[0], into[1].mul_(math.log(2)) if is_natural else into[1]

    def run_return_lse(self, q_nope: Array, q_pe: Array, ckv_cache: Array, *rest: Any, **options: Any) -> Result:
        """`run` with return_lse=True."""
        return self.run(q_nope, q_pe, ckv_cache, *rest, **options, return_lse=True)

    forward = run
    forward_return_lse = run_return_lse

    def end_forward(self) -> None:
        """Nothing is left to be ended."""


def _checked(starts: Tensor, indptr: Tensor, indices: Tensor, lengths: Tensor, *, page_size: int) -> tuple[Ints, Ints]:
    """Queries and tokens of each request."""
    given = zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), (starts, indptr, indices, lengths), strict=True)
    for name, found in given:
        if found.ndim != 1:
            raise ValueError(f"{name}: {tuple(found.shape)} has not one dimension")
    for name, found in (("qo_indptr", starts), ("kv_indptr", indptr)):
        if len(found) != len(lengths) + 1:
            raise ValueError(f"{name}: {len(found)} of them do not go with {len(lengths)} kv_len_arr")
    ends, pages, tokens = (np.array(x.tolist(), np.int32) for x in (starts, indptr, lengths))
    counts, held = np.diff(ends), np.diff(pages) * page_size
    if ends[0] or (counts < 0).any():
        raise ValueError(f"qo_indptr: {ends.tolist()} does not begin at 0 and ascend")
    if pages[0] < 0 or (held < 0).any() or pages[-1] > len(indices):
        raise ValueError(f"kv_indptr: {pages.tolist()} does not ascend within the {len(indices)} of kv_indices")
    if (wrong := (tokens < 0) | (tokens > held)).any():
        r = int(wrong.argmax())
        raise ValueError(f"kv_len_arr: request {r} has {tokens[r]} tokens in pages for {held[r]}")
    return counts, tokens


def _outputs(q: Tensor, out: Array | None, lse: Array | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    into, sums = outputs(q, None, None, return_lse or lse is not None)
    for name, given, made in (("out", out, into), ("lse", lse, sums)):
        if given is None or made is None:
            continue
        found = anywhere(name, given)
        if found.shape != made.shape or found.dtype is not made.dtype or not found.is_contiguous():
            wanted = f"contiguous {made.dtype} {tuple(made.shape)}"
            raise ValueError(f"{name}: {found.dtype} {tuple(found.shape)} is not {wanted}")
        into, sums = (found, sums) if name == "out" else (into, found)
    return into, sums


class _Gpu:
    """Runs a step on the CUDA kernels. Requests of one query each are decodes; else all are cut into tiles."""

    def __init__(self, step: _Step, workspace: DecodeWorkspace) -> None:
        self.step, self.workspace = step, workspace
        table, device = step.table, step.qo_indptr.device
        self._plan: PrefillPlan | None = None
        if (step.counts <= 1).all():
            rows = np.where(step.counts == 1, np.cumsum(step.counts) - 1, -1).astype(np.int32)
            self._table = PageTable(table.indptr, table.indices, table.kv_lens, torch.from_numpy(rows).to(device))
            return
        # Queries that see all tokens are as those of tokens that come after them.
        lengths = table.kv_lens if step.is_causal else table.kv_lens + step.qo_indptr.diff()
        self._table = PageTable(table.indptr, table.indices, lengths)
        tiles = torch.from_numpy(cut_rows(step.counts, step.lengths - step.counts, 1)).to(device)
        self._plan = PrefillPlan(tiles, step.qo_indptr, int(step.counts.sum()), 1)

    def attend(
        self, q: Tensor, turned: Tensor, pages: tuple[Tensor, Tensor | None], into: tuple[Tensor, Tensor | None]
    ) -> None:
        queries = Queries(tensor("q_nope", q).contiguous(), tensor("q_pe", turned).contiguous())
        mode = Mode(is_before=self._plan is not None and not self.step.is_causal)
        latent_attend(queries, pages, self._table, self._plan, self.step.scale, into, self.workspace, mode)


@dataclass(slots=True)
class _Requests:
    """An AttentionMeta of requests that read one KV head."""

    qo_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    kv_lens: Tensor
    kv_head_of: Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    slopes: Tensor | None = None


class _Cpu:
    """Runs a step on ops for the CPU's tensors. A row of the cache is key and value there, of which the output's first
    elements are kept."""

    def __init__(self, step: _Step, ops: OpSet) -> None:
        self.step, self._ops = step, ops
        self._rows: Tensor | None = None
        """Rows of the queries that see a token, where not all do."""
        heads, table = torch.zeros(step.heads, dtype=torch.int32), step.table
        if step.is_causal and (step.counts <= step.lengths).all():
            tables = step.qo_indptr, table.indptr, table.indices, table.kv_lens
            self._meta = _Requests(*tables, heads, step.scale)
            return
        # The ops are causal, and no request has more queries than tokens: each row becomes a request.
        request = np.repeat(np.arange(len(step.counts)), step.counts)
        seen = step.lengths[request]
        if step.is_causal:
            seen = np.maximum(seen - (np.cumsum(step.counts)[request] - 1 - np.arange(len(request))), 0)
        self._rows = torch.from_numpy(np.flatnonzero(seen))
        request, seen = request[seen > 0], seen[seen > 0]
        starts = table.indptr.tolist()
        pages = [table.indices[starts[r] : starts[r + 1]] for r in request.tolist()]
        page_indptr = np.cumsum([0, *map(len, pages)], dtype=np.int32)
        self._meta = _Requests(
            torch.arange(len(request) + 1, dtype=torch.int32),
            torch.from_numpy(page_indptr),
            torch.cat(pages) if pages else table.indices[:0],
            torch.from_numpy(seen.astype(np.int32)),
            heads,
            step.scale,
        )

    def attend(
        self, q: Tensor, turned: Tensor, pages: tuple[Tensor, Tensor | None], into: tuple[Tensor, Tensor | None]
    ) -> None:
        cache, scales = pages
        if cache.device.type != "cpu":
            raise ValueError(f"ckv_cache: is on {cache.device}, the wrapper's workspace buffer on the CPU")
        for name, x in (("q_nope", q), ("q_pe", turned)):
            if x.dtype not in _QUERIES:
                raise ValueError(f"{name}: {x.dtype} is not float32, bfloat16 or float16; convert it")
        if not cache.is_contiguous():
            raise ValueError(
                f"ckv_cache: rows of {cache.shape[3]} in strides {cache.stride()} do not lie one after the other, as "
                "CPUs' kernels want them; give a cache of these rows alone, or a copy"
            )
        queries = torch.cat((q, turned), 2).float()
        if self._rows is not None:
            queries = queries[self._rows]
        found = torch.empty_like(queries)
        self._ops.attention(queries, cache, cache, scales, scales, None, self._meta, found)
        sums = None if into[1] is None else log_sums(queries, cache, scales, self._meta)
        rows = slice(None) if self._rows is None else self._rows
        for to, made, nothing in ((into[0], found[..., : q.shape[2]], 0.0), (into[1], sums, -torch.inf)):
            if to is not None and made is not None:
                to.fill_(nothing)[rows] = made.to(to.dtype)


@functools.cache
def _ops(backend: str, threads: int) -> OpSet:
    return op_set(backend, threads)
