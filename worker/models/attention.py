"""From a step's inputs to what the op `attention` wants to know of it, which each backend has in its own shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.attention import StepAttention
from allspan.kernels.cuda.attention.cascade import CascadeLevel, CascadeWorkspace, cascade_workspace
from allspan.kernels.cuda.attention.cascade_rule import CascadeRule, tile_token
from allspan.kernels.cuda.attention.decode import decode_workspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan, Tiling
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.worker.models.step_meta import MetaContext, StepMeta
from allspan.worker.step.inputs import PlanTiles, StepInputs


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """One rank's heads of an attention layer."""

    kv_head_of: tuple[int, ...]
    """For each query head, the index of its KV head."""
    num_kv_heads: int
    head_dim: int
    scale: float
    """The factor of scores before the softmax."""
    most_kv_heads: int
    """Of any rank."""
    group: int
    """Query heads that read a KV head, in the whole model."""


def attention_meta(heads: AttentionHeads, context: MetaContext) -> StepMeta:
    """That of the op set."""
    if context.ops.name.startswith("cuda/"):
        return _Gpu(heads, context)
    return _Plain(heads, context.device)


@dataclass(slots=True)
class _Attention:
    """See `allspan.kernels.ops.AttentionMeta`."""

    qo_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    kv_lens: Tensor
    kv_head_of: Tensor
    scale: float


class _Plain:
    plan_tiles: PlanTiles | None = None
    cascade_rule: CascadeRule | None = None

    def __init__(self, heads: AttentionHeads, device: str) -> None:
        self._kv_head_of = torch.tensor(heads.kv_head_of, dtype=torch.int32, device=device)
        self._scale = heads.scale

    def of(self, inputs: StepInputs) -> _Attention:
        return _Attention(
            inputs.qo_indptr, inputs.page_indptr, inputs.page_indices, inputs.kv_lens, self._kv_head_of, self._scale
        )


class _Gpu:
    """The kernels want requests with one new token apart from the others, which come in tiles."""

    def __init__(self, heads: AttentionHeads, context: MetaContext) -> None:
        kv_heads, dim, most = heads.num_kv_heads, heads.head_dim, context.limits.max_requests
        device = torch.device(context.device)
        first_heads = np.searchsorted(np.asarray(heads.kv_head_of), np.arange(kv_heads + 1)).astype(np.int32)
        self._first_heads = torch.from_numpy(first_heads).to(device)
        self._group = int(np.diff(first_heads).max())
        self._scale = heads.scale
        self._workspace = decode_workspace(most, kv_heads, dim, device)
        self._rule: CascadeRule | None = None
        self._states: CascadeWorkspace | None = None
        if context.limits.uses_cascades:
            self._rule = rule = _rule(heads, context, device)
            states = max((rule.parts(rows) * rows for rows in range(1, most + 1) if rule.may_pay(rows)), default=0)
            all_heads = len(heads.kv_head_of), kv_heads
            self._states = cascade_workspace(most, all_heads, dim, -(-states // most), device) if states else None

    @property
    def plan_tiles(self) -> PlanTiles | None:
        return Tiling(self._group)

    @property
    def cascade_rule(self) -> CascadeRule | None:
        return self._rule

    def of(self, inputs: StepInputs) -> Any:
        count, pages = inputs.num_decodes, inputs.page_indices
        heads: dict[str, Any] = {"first_heads": self._first_heads, "most_heads": self._group}
        if (shared := inputs.shared) is not None and self._rule and self._states:
            plan = PrefillPlan(shared.tiles, shared.qo_indptr, count, self._rule.group)
            table = PageTable(shared.page_indptr, pages, shared.kv_lens, **heads)
            own = PageTable(shared.own_page_indptr, pages, shared.own_kv_lens, **heads)
            level = CascadeLevel(table, plan, self._rule.parts(count))
            return StepAttention(own, None, self._scale, self._workspace, (level, self._states))
        decodes = prefills = None
        table = PageTable(inputs.page_indptr, pages, inputs.kv_lens, **heads)
        if inputs.decode_rows is not None:
            decodes = replace(table, rows=inputs.decode_rows)
        elif count:
            decodes = PageTable(inputs.page_indptr[: count + 1], pages, inputs.kv_lens[:count], **heads)
        if inputs.tiles is not None and len(inputs.tiles):
            prefills = table, PrefillPlan(inputs.tiles, inputs.qo_indptr, len(inputs.ids), self._group)
        return StepAttention(decodes, prefills, self._scale, self._workspace)


def _rule(heads: AttentionHeads, context: MetaContext, device: torch.device) -> CascadeRule:
    """The same on every rank, whatever heads it has: rows must stand in one order, and ranks capture steps together."""
    cost = tile_token(context.cache.dtype, context.cache.page_size, heads.head_dim, device)
    return CascadeRule(heads.most_kv_heads, heads.group, heads.head_dim, cost, context.limits.max_model_len, device)
