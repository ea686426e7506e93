"""From a step's inputs to what the op `attention` wants to know of it, which each backend has in its own shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.cuda.attention import StepAttention
from allspan.kernels.cuda.decode import decode_workspace
from allspan.kernels.cuda.pages import PageTable
from allspan.kernels.cuda.prefill import PrefillPlan, cut_prefill
from allspan.kernels.ops import OpSet
from allspan.worker.models.inputs import PlanTiles, StepInputs
from allspan.worker.models.limits import ModelLimits
from allspan.worker.models.shard import Shard


class StepMeta(Protocol):
    """Makes the op's `meta`."""

    @property
    def plan_tiles(self) -> PlanTiles | None:
        """See `allspan.worker.models.model.Model.plan_tiles`."""

    def of(self, inputs: StepInputs) -> Any: ...


def attention_of(shard: Shard, limits: ModelLimits, ops: OpSet, device: str) -> StepMeta:
    """That of the op set."""
    if ops.name.startswith("cuda/"):
        return _Gpu(shard, limits, device)
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

    def __init__(self, shard: Shard, device: str) -> None:
        self._kv_head_of = torch.tensor(shard.kv_head_of, dtype=torch.int32, device=device)
        self._scale = shard.spec.head_dim**-0.5

    def of(self, inputs: StepInputs) -> _Attention:
        return _Attention(
            inputs.qo_indptr, inputs.page_indptr, inputs.page_indices, inputs.kv_lens, self._kv_head_of, self._scale
        )


class _Gpu:
    """The kernels want requests with one new token apart from the others, which come in tiles."""

    def __init__(self, shard: Shard, limits: ModelLimits, device: str) -> None:
        kv_heads = len(shard.kv_heads)
        first_heads = np.searchsorted(np.asarray(shard.kv_head_of), np.arange(kv_heads + 1)).astype(np.int32)
        self._first_heads = torch.from_numpy(first_heads).to(device)
        self._group = int(np.diff(first_heads).max())
        self._scale = shard.spec.head_dim**-0.5
        self._workspace = decode_workspace(limits.max_requests, kv_heads, shard.spec.head_dim, device)

    @property
    def plan_tiles(self) -> PlanTiles | None:
        return self._tiles

    def _tiles(self, counts: NDArray[np.int64], kv_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        return cut_prefill(counts.astype(np.int32), kv_lens.astype(np.int32), self._group)

    def of(self, inputs: StepInputs) -> Any:
        count, pages = inputs.num_decodes, inputs.page_indices
        heads: dict[str, Any] = {"first_heads": self._first_heads, "most_heads": self._group}
        decodes = prefills = None
        if count:
            decodes = PageTable(inputs.page_indptr[: count + 1], pages, inputs.kv_lens[:count], **heads)
        if inputs.tiles is not None and len(inputs.tiles):
            table = PageTable(inputs.page_indptr, pages, inputs.kv_lens, **heads)
            prefills = table, PrefillPlan(inputs.tiles, inputs.qo_indptr, len(inputs.ids), self._group)
        return StepAttention(decodes, prefills, self._scale, self._workspace)
