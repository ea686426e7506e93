"""What the CUDA kernels of the op `attention` take of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from allspan.kernels.cuda.attention.attention import StepAttention
from allspan.kernels.cuda.attention.cascade import CascadeLevel, CascadeWorkspace, cascade_workspace
from allspan.kernels.cuda.attention.cascade_rule import CascadeRule, tile_token
from allspan.kernels.cuda.attention.decode import decode_workspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan, Tiling
from allspan.kernels.cuda.cache.pages import PageTable, Scores
from allspan.kernels.cuda.jit.modules import gpu
from allspan.kernels.cuda.latent import expand
from allspan.kernels.cuda.latent.attend.attend import attend_workspace
from allspan.kernels.cuda.latent.expand import Expanded, ExpandRoom, expand_room
from allspan.kernels.cuda.latent.expand_rule import MOST_BEFORE, ExpandRule
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.step.backend import AttentionHeads
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.step.inputs import StepInputs


class CudaMetadata:
    """See `allspan.worker.step.backend.StepMetadata`. The kernels take requests with one new token apart from the
    others, which come in tiles."""

    def __init__(self, heads: AttentionHeads, cache: CacheSpec, limits: ModelLimits, device: torch.device) -> None:
        kv_heads, dim, most = heads.num_kv_heads, heads.head_dim, limits.max_requests
        first_heads = np.searchsorted(np.asarray(heads.kv_head_of), np.arange(kv_heads + 1)).astype(np.int32)
        self._first_heads = torch.from_numpy(first_heads).to(device)
        self._group = int(np.diff(first_heads).max())
        slopes = None if heads.slopes is None else torch.tensor(heads.slopes, dtype=torch.float32, device=device)
        self._scores = Scores(heads.scale, heads.window - 1, heads.soft_cap, slopes)
        is_latent = cache.is_latent
        self._workspace = attend_workspace(dim, device) if is_latent else decode_workspace(most, kv_heads, dim, device)
        self.cascade_rule: CascadeRule | None = None
        """When the rows of a decode step read what they share as one; None: never."""
        self.plan_tiles = Tiling(1 if is_latent else self._group)
        """Cuts the new tokens of a step on the host."""
        self.expand_rule: ExpandRule | None = None
        """Chooses the requests of which keys and values are made of latents; None: there are none."""
        self._room: ExpandRoom | None = None
        if _may_expand(heads):
            self.expand_rule = _expand_rule(heads, limits, gpu(device).multiprocessors)
            self._room = expand_room(self.expand_rule, device)
        self._states: CascadeWorkspace | None = None
        if limits.uses_cascades and not heads.window and not is_latent:
            self.cascade_rule = rule = _rule(heads, cache, limits, device)
            states = max((rule.parts(rows) * rows for rows in range(1, most + 1) if rule.may_pay(rows)), default=0)
            counts = len(heads.kv_head_of), kv_heads
            self._states = cascade_workspace(most, counts, dim, -(-states // most), device) if states else None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return () if self._room is None else (self._room.latents, self._room.made)

    def of(self, inputs: StepInputs) -> StepAttention:
        count, pages, rule = inputs.num_decodes, inputs.page_indices, self.cascade_rule
        heads: dict[str, Any] = {"first_heads": self._first_heads, "most_heads": self._group}
        if (shared := inputs.shared) is not None and rule and self._states:
            plan = PrefillPlan(shared.tiles, shared.qo_indptr, count, rule.group)
            table = PageTable(shared.page_indptr, pages, shared.kv_lens, **heads)
            own = PageTable(shared.own_page_indptr, pages, shared.own_kv_lens, **heads)
            level = CascadeLevel(table, plan, rule.parts(count))
            return StepAttention(own, None, self._scores, self._workspace, (level, self._states))
        decodes = prefills = None
        table = PageTable(inputs.page_indptr, pages, inputs.kv_lens, **heads)
        if inputs.decode_rows is not None:
            decodes = replace(table, rows=inputs.decode_rows)
        elif count:
            decodes = PageTable(inputs.page_indptr[: count + 1], pages, inputs.kv_lens[:count], **heads)
        if inputs.tiles is not None and len(inputs.tiles):
            prefills = table, PrefillPlan(inputs.tiles, inputs.qo_indptr, len(inputs.positions), self.plan_tiles.group)
        expanded = self._expanded(inputs, table)
        return StepAttention(decodes, prefills, self._scores, self._workspace, expanded=expanded)

    def _expanded(self, inputs: StepInputs, table: PageTable) -> Expanded | None:
        if (made := inputs.expanded) is None or self._room is None:
            return None
        plan = PrefillPlan(made.tiles, inputs.qo_indptr, len(inputs.positions), self.plan_tiles.group)
        return Expanded(table, plan, made.indptr, made.rows, self._room)


def kept_bytes(heads: AttentionHeads, limits: ModelLimits) -> int:
    """See `Backend.attention_bytes`."""
    return expand.room_bytes(_expand_rule(heads, limits, multiprocessors=1)) if _may_expand(heads) else 0


def _may_expand(heads: AttentionHeads) -> bool:
    """Whether there are kernels for keys and values made of the latents of these heads."""
    sizes = heads.latents
    return sizes is not None and expand.runs((sizes.key + sizes.rot, sizes.value))


def _expand_rule(heads: AttentionHeads, limits: ModelLimits, multiprocessors: int) -> ExpandRule:
    assert heads.latents is not None
    tokens = limits.max_tokens + min(limits.max_model_len, MOST_BEFORE)
    return ExpandRule(heads.latents, heads.group, tokens, multiprocessors)


def _rule(heads: AttentionHeads, cache: CacheSpec, limits: ModelLimits, device: torch.device) -> CascadeRule:
    """The same on every rank, whatever heads it has: rows must stand in one order, and ranks capture steps together."""
    cost = tile_token(cache.dtype, cache.page_size, heads.head_dim, device)
    return CascadeRule(heads.most_kv_heads, heads.group, heads.head_dim, cost, limits.max_model_len, device)
