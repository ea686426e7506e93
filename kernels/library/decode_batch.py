"""Attention of one query for each of many requests, over pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.decode import MOST_GROUP, DecodeWorkspace, decode_workspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan, cut_rows
from allspan.kernels.cuda.cache.pages import KV, PageTable, kv_of
from allspan.kernels.library.arrays import Array, PagedCache, check_layout, outputs, pages, queries, tensor
from allspan.kernels.library.requests import Gathered, PageBuffers
from allspan.kernels.library.rope import rotated
from allspan.kernels.library.run import Result, run_decode, run_prefill
from allspan.kernels.library.variant import Variant


class BatchDecodeWithPagedKVCacheWrapper:
    """plan for a step's page table, run for each layer. Lengths are read on the GPU alone, so plan waits for nothing,
    and with use_cuda_graph a captured run serves what later plans put into the buffers."""

    def __init__(
        self,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Array | None = None,
        paged_kv_indices_buffer: Array | None = None,
        paged_kv_last_page_len_buffer: Array | None = None,
        **options: Any,
    ) -> None:
        """Takes only the device of float_workspace_buffer: scratch is its own. Tensor cores are always used."""
        check_layout(kv_layout)
        Variant().but(options)
        self._layout = kv_layout
        self._device = tensor("float_workspace_buffer", float_workspace_buffer).device
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._is_graph = use_cuda_graph
        self._buffers = PageBuffers(self._device, buffers if use_cuda_graph else None)
        self._table: PageTable | None = None
        self._workspace: DecodeWorkspace | None = None
        self._sizes: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._is_graph

    def plan(
        self,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        """indptr int32 [requests + 1], indices [pages], last_page_len [requests], of 1 … page_size; a request without
        pages has no tokens, and gets zeros. options: those of `Variant`."""
        self._variant = Variant().but(options)
        self._table = self._buffers.table((indptr, indices, last_page_len), page_size)
        self._gathered = Gathered(self._table, page_size)
        requests = len(self._table.kv_lens)
        group = max(1, num_qo_heads // max(1, num_kv_heads))
        sizes = (requests, num_qo_heads, num_kv_heads, head_dim)
        if sizes != self._sizes:
            self._sizes = sizes
            self._workspace = decode_workspace(requests, num_kv_heads, head_dim, self._device)
            self._plan = None if group <= MOST_GROUP else _single_queries(requests, group, self._device)

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
        """q [requests, heads, head_dim], float16 or bfloat16. Returns what `single_decode_with_kv_cache` does, for
        each. options: those of `Variant`, before those of plan. Raises ValueError for other sizes than plan's."""
        if self._table is None or self._workspace is None:
            raise RuntimeError("run: there is no plan; call plan first")
        x, variant = queries("q", q), self._variant.but(options)
        cache = pages(paged_kv_cache, self._layout)
        found = (*x.shape[:2], cache[0].shape[1], x.shape[2])
        if found != self._sizes:
            raise ValueError(f"q: (requests, heads, kv_heads, head_dim) {found} are not plan's {self._sizes}")
        kv, table = kv_of(cache, x.shape[2]), self._table  # type: ignore[arg-type]
        if variant.is_rotary:
            if self._is_graph:
                raise ValueError("pos_encoding_mode: 'ROPE_LLAMA' copies keys, which no graph can; rotate them before")
            x, kv, table = self._rotated(x, cache, variant)
        into = outputs(x, out, lse, return_lse)
        if self._plan is not None:
            return run_prefill(x, kv, table, self._plan, variant, into)
        return run_decode(x, kv, table, variant, into, self._workspace)

    def _rotated(self, q: Tensor, cache: tuple[Tensor, ...], variant: Variant) -> tuple[Tensor, KV, PageTable]:
        page, offset, position = self._gathered.places()
        keys, values = (x[page, :, offset].to(q.dtype) for x in cache[:2])
        angles = variant.rope_scale, variant.rope_theta
        kv, table = self._gathered.dense(rotated(keys, position, *angles), values)
        return rotated(q, table.kv_lens - 1, *angles), kv, table

    def run_return_lse(self, q: Array, paged_kv_cache: PagedCache, **options: Any) -> Result:
        """`run` with return_lse=True."""
        return self.run(q, paged_kv_cache, **options, return_lse=True)

    forward = run
    forward_return_lse = run_return_lse

    def end_forward(self) -> None:
        """Nothing is left to be ended."""


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """For captured graphs, with the buffers that they read."""

    def __init__(
        self,
        workspace_buffer: Array,
        indptr_buffer: Array,
        indices_buffer: Array,
        last_page_len_buffer: Array,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def _single_queries(requests: int, group: int, device: torch.device) -> PrefillPlan:
    """For more query heads a KV head than decode takes: prefill of one query each, the same for all lengths."""
    tiles = cut_rows(np.ones(requests, np.int32), np.zeros(requests, np.int32), group)
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device)
    return PrefillPlan(torch.from_numpy(tiles).to(device), indptr, requests, group)
