"""From a step's inputs to what the op `attention` wants to know of it, which each backend has in its own shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.attention import StepAttention
from allspan.kernels.cuda.attention.cascade import CascadeLevel, CascadeWorkspace, cascade_workspace
from allspan.kernels.cuda.attention.cascade_rule import CascadeRule, tile_token
from allspan.kernels.cuda.attention.decode import decode_workspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan, Tiling
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.ops import OpSet
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.models.shard import Shard
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.step.inputs import PlanTiles, StepInputs


class StepMeta(Protocol):
    """Makes the op's `meta`."""

    @property
    def plan_tiles(self) -> PlanTiles | None:
        """See `allspan.worker.models.model.Model.plan_tiles`."""

    @property
    def cascade_rule(self) -> CascadeRule | None:
        """See `allspan.worker.models.model.Model.cascade_rule`."""

    def of(self, inputs: StepInputs) -> Any: ...


def attention_of(shard: Shard, cache: CacheSpec, limits: ModelLimits, ops: OpSet, device: str) -> StepMeta:
    """That of the op set."""
    if ops.name.startswith("cuda/"):
        return _Gpu(shard, cache, limits, torch.device(device))
    return _Plain(shard, device)


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

    def __init__(self, shard: Shard, device: str) -> None:
        self._kv_head_of = torch.tensor(shard.kv_head_of, dtype=torch.int32, device=device)
        self._scale = shard.spec.head_dim**-0.5

    def of(self, inputs: StepInputs) -> _Attention:
        return _Attention(
            inputs.qo_indptr, inputs.page_indptr, inputs.page_indices, inputs.kv_lens, self._kv_head_of, self._scale
        )


class _Gpu:
    """The kernels want requests with one new token apart from the others, which come in tiles."""

    def __init__(self, shard: Shard, cache: CacheSpec, limits: ModelLimits, device: torch.device) -> None:
        kv_heads, dim, most = len(shard.kv_heads), shard.spec.head_dim, limits.max_requests
        first_heads = np.searchsorted(np.asarray(shard.kv_head_of), np.arange(kv_heads + 1)).astype(np.int32)
        self._first_heads = torch.from_numpy(first_heads).to(device)
        self._group = int(np.diff(first_heads).max())
        self._scale = dim**-0.5
        self._workspace = decode_workspace(most, kv_heads, dim, device)
        self._rule: CascadeRule | None = None
        self._states: CascadeWorkspace | None = None
        if limits.uses_cascades:
            self._rule = rule = _rule(shard, cache, limits, device)
            states = max((rule.parts(rows) * rows for rows in range(1, most + 1) if rule.may_pay(rows)), default=0)
            heads = len(shard.query_heads), kv_heads
            self._states = cascade_workspace(most, heads, dim, -(-states // most), device) if states else None

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


def _rule(shard: Shard, cache: CacheSpec, limits: ModelLimits, device: torch.device) -> CascadeRule:
    """The same on every rank, whatever heads it has: rows must stand in one order, and ranks capture steps together."""
    spec = shard.spec
    kv_heads, group = -(-spec.num_kv_heads // shard.size), -(-spec.num_heads // spec.num_kv_heads)
    cost = tile_token(cache.dtype, cache.page_size, spec.head_dim, device)
    return CascadeRule(kv_heads, group, spec.head_dim, cost, limits.max_model_len, device)
