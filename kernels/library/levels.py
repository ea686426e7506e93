"""Requests that share tokens: attention over those and over each one's own, merged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.cuda.attention import cascade
from allspan.kernels.library.arrays import Array, PagedCache, keys_and_values, tensor
from allspan.kernels.library.decode_batch import BatchDecodeWithPagedKVCacheWrapper
from allspan.kernels.library.prefill_batch import BatchPrefillWithPagedKVCacheWrapper
from allspan.kernels.library.run import Result
from allspan.kernels.library.single import single_prefill_with_kv_cache
from allspan.kernels.library.variant import Variant


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array) -> tuple[Tensor, Tensor]:
    """The state of what two saw, each of v [n, heads, head_dim] and s float32 [n, heads], logarithms to base 2."""
    return cascade.merge_state(*_state(v_a, s_a), *_state(v_b, s_b))


def merge_state_in_place(v: Array, s: Array, v_other: Array, s_other: Array, mask: Array | None = None) -> None:
    """`merge_state` into the first; with mask, bool [n], only rows where it is True."""
    own, other = (tensor("v", v), tensor("s", s)), _state(v_other, s_other)
    if mask is not None:  # a state that saw nothing changes nothing
        other = other[0], other[1].masked_fill(~tensor("mask", mask).bool()[:, None], -torch.inf)
    cascade.merge_state_in_place(*own, *other)


def merge_states(v: Array, s: Array) -> tuple[Tensor, Tensor]:
    """The state of what many saw: v [n, states, heads, head_dim] and s float32 [n, states, heads]."""
    return cascade.merge_states(*_state(v, s))


def _state(v: Array, s: Array) -> tuple[Tensor, Tensor]:
    return tensor("v", v).contiguous(), tensor("s", s).float().contiguous()


class MultiLevelCascadeAttentionWrapper:
    """Levels of shared tokens: in the first, groups of neighbouring requests share the most; in the last, each request
    has its own, to which `causal` applies. Every query sees its tokens of all levels."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        **buffers: Any,
    ) -> None:
        """use_cuda_graph: lists of buffers for each level, named as in FlashInfer."""
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        given = {name: buffers.pop(f"{name}_buf_arr", None) for name in names}
        if buffers:
            raise TypeError(f"{next(iter(buffers))}: there is no such argument")
        self._is_graph = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph,
                **{f"{name}_buf": array[level] for name, array in given.items() if array is not None},
            )
            for level in range(num_levels)
        ]  # fmt: skip
        self._sinks: Array | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._is_graph

    def plan(
        self,
        qo_indptr_arr: Sequence[Array],
        paged_kv_indptr_arr: Sequence[Array],
        paged_kv_indices_arr: Sequence[Array],
        paged_kv_last_page_len: Sequence[Array],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        """For each level as the paged prefill wrapper's plan. Raises ValueError for what knows positions, which tokens
        of levels have none of: a window, rotary and ALiBi."""
        causal = options.pop("causal", False)
        self._sinks = options.pop("sinks", None)
        for name, off in (("window_left", -1), ("pos_encoding_mode", "NONE")):
            if options.get(name, off) != off:
                raise ValueError(f"{name}: {options[name]!r}; tokens of levels have no positions, leave it out")
        tables = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        for level, (wrapper, starts, indptr, indices, last) in enumerate(zip(self._levels, *tables, strict=True)):
            is_own = level == len(self._levels) - 1
            wrapper.plan(starts, indptr, indices, last, *sizes, **options, causal=causal and is_own)

    begin_forward = plan

    def run(self, q: Array, paged_kv_cache: PagedCache) -> Tensor:
        """q and out: [queries, heads, head_dim]."""
        *shared, own = self._levels
        sinks = None if self._sinks is None else tensor("sinks", self._sinks).float().contiguous()
        out, lse = own.run_return_lse(q, paged_kv_cache, sinks=None if shared else sinks)
        for i, level in enumerate(shared, start=1):
            of_all = sinks if i == len(shared) else None
            other, other_lse = level.run_return_lse(q, paged_kv_cache)
            cascade.merge_state_in_place(out, lse, other, other_lse, of_all)
        assert isinstance(out, Tensor)
        return out

    forward = run

    def end_forward(self) -> None:
        """Nothing is left to be ended."""


def _with_shared(
    run_own: Callable[..., Result], variant: Variant, q: Array, shared: tuple[Array, Array], layout: str
) -> Tensor:
    """The state of each query's own tokens, merged with that of keys and values that all share; the variant is for
    both, its sinks for what they make together."""
    if variant.knows_places:
        raise ValueError(
            f"window_left: {variant.window_left}, pos_encoding_mode: {variant.pos_encoding_mode!r}; shared tokens have "
            "no positions, leave both out"
        )
    names = ("sm_scale", "logits_soft_cap", "q_scale", "k_scale", "v_scale")
    options = {name: getattr(variant, name) for name in names}
    out, lse = run_own(sinks=None, **options)
    k, v = keys_and_values(*shared, layout)
    sinks = None if variant.sinks is None else tensor("sinks", variant.sinks).float().contiguous()
    other, other_lse = single_prefill_with_kv_cache(q, k, v, return_lse=True, **options)
    cascade.merge_state_in_place(out, lse, other, other_lse, sinks)
    return out


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Two levels: k_shared and v_shared [tokens, kv_heads, head_dim] for all, pages for each one's own."""

    def forward(  # type: ignore[override]
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: PagedCache, **options: Any
    ) -> Tensor:
        """q and out: [requests, heads, head_dim]."""
        run_own = functools.partial(self.run_return_lse, q, unique_kv_cache)
        return _with_shared(run_own, self._variant.but(options), q, (k_shared, v_shared), self._layout)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Two levels, as the decode one; causal among each request's own tokens."""

    def forward(  # type: ignore[override]
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: PagedCache, **options: Any
    ) -> Tensor:
        """q and out: [queries, heads, head_dim]."""
        run_own = functools.partial(self.run_return_lse, q, unique_kv_cache)
        return _with_shared(run_own, self._variant.but(options), q, (k_shared, v_shared), self._layout)
