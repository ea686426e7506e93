"""The engine's attention on a GPU: decode and prefill kernels for the requests of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from allspan.kernels.cuda.decode import DecodeWorkspace, paged_decode
from allspan.kernels.cuda.pages import PageTable
from allspan.kernels.cuda.prefill import PrefillPlan, paged_prefill


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What `attention` takes for its `meta`. Requests with one new token come first, and each is a row of the step."""

    decodes: PageTable | None
    prefills: tuple[PageTable, PrefillPlan] | None
    scale: float
    workspace: DecodeWorkspace


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    meta: StepAttention,
    out: Tensor,
) -> None:
    """See `allspan.kernels.ops.OpSet.attention`. q and out bfloat16; rows of `out` that no request has are left."""
    cache = k_cache, v_cache, k_scales, v_scales
    if meta.decodes is not None:
        count = len(meta.decodes.kv_lens)
        paged_decode(q[:count], cache, meta.decodes, meta.scale, out[:count], None, meta.workspace)
    if meta.prefills is not None:
        table, plan = meta.prefills
        paged_prefill(q, cache, table, plan, meta.scale, True, out, None)
