"""Attention of any number of queries for each of many requests, over pages or ragged keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.prefill import PrefillPlan, cut_rows
from allspan.kernels.cuda.cache.pages import KV, PageTable, dense, dense_table, kv_of
from allspan.kernels.library.arrays import (
    Array,
    PagedCache,
    check_layout,
    ints,
    keys_and_values,
    outputs,
    pages,
    queries,
    tensor,
)  # fmt: skip
from allspan.kernels.library.requests import Gathered, PageBuffers
from allspan.kernels.library.rope import rotated
from allspan.kernels.library.run import Result, run_prefill
from allspan.kernels.library.variant import Variant

_ROWS = 128  # of a tile of queries


class _Prefill:
    """What both wrappers have: queries cut into tiles, on the host, which waits for qo_indptr and lengths."""

    def __init__(self, workspace: Array, kv_layout: str, use_cuda_graph: bool, options: dict[str, Any]) -> None:
        check_layout(kv_layout)
        Variant().but(options)
        self._layout = kv_layout
        self._device = tensor("float_workspace_buffer", workspace).device
        self._is_graph = use_cuda_graph
        self._plan: PrefillPlan | None = None
        self._variant = Variant()

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._is_graph

    def _cut(self, qo_indptr: Array, kv_lens: Tensor, sizes: tuple[int, int, int]) -> None:
        """sizes: heads, kv_heads and head_dim."""
        starts = ints("qo_indptr", qo_indptr, self._device)
        if len(starts) != len(kv_lens) + 1:
            raise ValueError(f"qo_indptr: {len(starts)} of them do not go with {len(kv_lens)} requests")
        self._sizes, group = sizes, max(1, sizes[0] // max(1, sizes[1]))
        ends, lengths = (np.array(x.tolist(), np.int32) for x in (starts, kv_lens))
        counts = np.diff(ends)
        wrong = (counts < 0) | ((counts > lengths) & self._variant.causal)
        if wrong.any():
            r = int(wrong.argmax())
            raise ValueError(f"qo_indptr: request {r} has {counts[r]} queries, which are of its {lengths[r]} tokens")
        tiles = torch.from_numpy(cut_rows(counts, lengths - counts, group)).to(self._device)
        total = int(ends[-1])
        if not self._is_graph:
            self._plan = PrefillPlan(tiles, starts, total, group)
            return
        if self._plan is None:
            most = total * group // _ROWS + len(kv_lens)  # however the queries are shared out
            self._plan = PrefillPlan(torch.full((most, 2), -1, device=self._device).int(), starts.clone(), total, group)
        held = self._plan
        if total > held.queries or len(starts) != len(held.qo_indptr) or group != held.group:
            made_for = (held.queries, len(held.qo_indptr) - 1, held.group)
            raise ValueError(f"qo_indptr: use_cuda_graph keeps (most queries, requests, group) {made_for} of the first")
        held.tiles.fill_(-1)
        held.tiles[: len(tiles)].copy_(tiles)
        held.qo_indptr.copy_(starts)

    def _checked(self, q: Array, kv_heads: int, options: dict[str, Any]) -> tuple[Tensor, Variant, PrefillPlan]:
        if self._plan is None:
            raise RuntimeError("run: there is no plan; call plan first")
        x, variant = queries("q", q), self._variant.but(options)
        if (found := (x.shape[1], kv_heads, x.shape[2])) != self._sizes:
            raise ValueError(f"q: (heads, kv_heads, head_dim) {found} are not plan's {self._sizes}")
        if variant.is_rotary and self._is_graph:
            raise ValueError("pos_encoding_mode: 'ROPE_LLAMA' copies keys, which no graph can; rotate them before")
        return x, variant, self._plan

    def _turn(self, q: Tensor, variant: Variant, plan: PrefillPlan, lengths: Tensor) -> Tensor:
        """Queries at the last positions of their requests."""
        starts = plan.qo_indptr
        rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
        request = torch.searchsorted(starts, rows, right=True) - 1
        positions = rows - starts[request + 1] + lengths[request]
        return rotated(q, positions, variant.rope_scale, variant.rope_theta)

    def end_forward(self) -> None:
        """Nothing is left to be ended."""


class BatchPrefillWithPagedKVCacheWrapper(_Prefill):
    """plan for a step, run for each layer. Requests of one query are better off with the decode wrapper."""

    def __init__(
        self,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Array | None = None,
        paged_kv_indptr_buf: Array | None = None,
        paged_kv_indices_buf: Array | None = None,
        paged_kv_last_page_len_buf: Array | None = None,
        **options: Any,
    ) -> None:
        """Takes only the device of float_workspace_buffer and nothing of qo_indptr_buf: both are the wrapper's own.

        With use_cuda_graph no plan may have more queries than the first one, nor other numbers of requests."""
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, options)
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._buffers = PageBuffers(self._device, buffers if use_cuda_graph else None)

    def plan(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        """Request r has queries qo_indptr[r] … qo_indptr[r + 1] - 1; pages as for the decode wrapper. options: those of
        `Variant`; causal=True lines up the last query with the last token."""
        self._variant = Variant().but(options)
        self._table = self._buffers.table((paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), page_size)
        self._gathered = Gathered(self._table, page_size)
        self._cut(qo_indptr, self._table.kv_lens, (num_qo_heads, num_kv_heads, head_dim_qk))

    begin_forward = plan

    def run(
        self,
        q: Array,
        paged_kv_cache: PagedCache,
        *,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Result:
        """q [qo_indptr[-1], heads, head_dim]. Returns out as q, with return_lse=True also float32 [rows, heads].
        options: those of `Variant`, before those of plan. Raises ValueError for other sizes than plan's."""
        cache = pages(paged_kv_cache, self._layout)
        x, variant, plan = self._checked(q, cache[0].shape[1], options)
        table = self._table
        kv = kv_of(cache, x.shape[2])  # type: ignore[arg-type]
        if variant.is_rotary:
            page, offset, position = self._gathered.places()
            keys, values = (part[page, :, offset].to(x.dtype) for part in cache[:2])
            keys = rotated(keys, position, variant.rope_scale, variant.rope_theta)
            x = self._turn(x, variant, plan, table.kv_lens)
            kv, table = self._gathered.dense(keys, values)
        return run_prefill(x, kv, table, plan, variant, outputs(x, out, lse, return_lse))

    def run_return_lse(self, q: Array, paged_kv_cache: PagedCache, **options: Any) -> Result:
        """`run` with return_lse=True."""
        return self.run(q, paged_kv_cache, **options, return_lse=True)

    forward = run
    forward_return_lse = run_return_lse


class BatchPrefillWithRaggedKVCacheWrapper(_Prefill):
    """Prefill attention like the paged wrapper's, over keys and values [tokens, kv_heads, head_dim] that lie one
    request after the other."""

    def __init__(
        self,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Array | None = None,
        kv_indptr_buf: Array | None = None,
        **options: Any,
    ) -> None:
        """The buffers are the wrapper's own."""
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, options)
        self._table: PageTable | None = None

    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        **options: Any,
    ) -> None:
        """Request r has queries qo_indptr[r] … and tokens kv_indptr[r] …, up to those of r + 1."""
        if head_dim_vo not in (None, head_dim_qk):
            raise ValueError(f"head_dim_vo: {head_dim_vo} is not head_dim_qk, {head_dim_qk}; pad values")
        self._variant = Variant().but(options)
        starts = ints("kv_indptr", kv_indptr, self._device)
        if self._is_graph and self._table is not None:
            self._table.indices.copy_(starts[:-1])
            self._table.kv_lens.copy_(starts.diff())
        else:
            self._table = dense_table(starts[:-1].clone(), starts.diff())
        self._cut(qo_indptr, self._table.kv_lens, (num_qo_heads, num_kv_heads, head_dim_qk))

    begin_forward = plan

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Result:
        """q [qo_indptr[-1], heads, head_dim]; k and v [kv_indptr[-1], kv_heads, head_dim], whatever kv_layout says, as
        in FlashInfer. Returns what the paged wrapper's run does."""
        keys, values = keys_and_values(k, v, "NHD")
        x, variant, plan = self._checked(q, keys.shape[1], options)
        table = self._table
        assert table is not None  # there is a plan
        if variant.is_rotary:
            rows = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
            request = torch.searchsorted(table.indices, rows, right=True) - 1
            positions = rows - table.indices[request]
            keys = rotated(keys.to(x.dtype), positions, variant.rope_scale, variant.rope_theta)
            x, values = self._turn(x, variant, plan, table.kv_lens), values.to(x.dtype).contiguous()
        kv: KV = dense(keys, values)
        return run_prefill(x, kv, table, plan, variant, outputs(x, out, lse, return_lse))

    def run_return_lse(self, q: Array, k: Array, v: Array, **options: Any) -> Result:
        """`run` with return_lse=True."""
        return self.run(q, k, v, **options, return_lse=True)

    forward = run
    forward_return_lse = run_return_lse
