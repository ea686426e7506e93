"""What the op `attention` of the CPU and of the reference takes of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.worker.step.backend import AttentionHeads
from allspan.worker.step.inputs import StepInputs


@dataclass(slots=True)
class PagedAttention:
    """See `allspan.kernels.attention_meta.AttentionMeta`."""

    qo_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    kv_lens: Tensor
    kv_head_of: Tensor
    scale: float
    window: int
    soft_cap: float
    slopes: Tensor | None


class PagedMetadata:
    """See `allspan.worker.step.backend.StepMetadata`: the step's own page table."""

    def __init__(self, heads: AttentionHeads, device: str) -> None:
        self._kv_head_of = torch.tensor(heads.kv_head_of, dtype=torch.int32, device=device)
        slopes = None if heads.slopes is None else torch.tensor(heads.slopes, dtype=torch.float32, device=device)
        self._scores = heads.scale, heads.window, heads.soft_cap, slopes

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return ()

    def of(self, inputs: StepInputs) -> PagedAttention:
        tables = inputs.qo_indptr, inputs.page_indptr, inputs.page_indices, inputs.kv_lens
        return PagedAttention(*tables, self._kv_head_of, *self._scores)
