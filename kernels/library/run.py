"""From tensors and a variant to the kernel that is the fastest for them."""

from __future__ import annotations

from torch import Tensor

from allspan.kernels.cuda.attention.decode import DecodeWorkspace, paged_decode
from allspan.kernels.cuda.attention.prefill import PrefillPlan, paged_prefill
from allspan.kernels.cuda.attention.prefill_sm90 import CAPABILITY, paged_prefill_sm90, why_not
from allspan.kernels.cuda.cache.pages import KV, PageTable
from allspan.kernels.cuda.jit.modules import gpu
from allspan.kernels.library.variant import Variant

Result = Tensor | tuple[Tensor, Tensor]
Into = tuple[Tensor, Tensor | None]


def run_decode(q: Tensor, kv: KV, table: PageTable, variant: Variant, into: Into, workspace: DecodeWorkspace) -> Result:
    """One query a request."""
    paged_decode(q, kv, table, variant.scores(q), *into, workspace)
    return _result(into, variant)


def run_prefill(q: Tensor, kv: KV, table: PageTable, plan: PrefillPlan, variant: Variant, into: Into) -> Result:
    """Any number of queries a request; on Hopper by its own kernel where that takes them."""
    scores = variant.scores(q)
    is_hopper = gpu(q.device).capability == CAPABILITY and not why_not(kv, q.shape[2])
    run = paged_prefill_sm90 if is_hopper else paged_prefill
    run(q, kv, table, plan, scores, variant.causal, *into)
    return _result(into, variant)


def _result(into: Into, variant: Variant) -> Result:
    out, lse = into
    if variant.v_scale is not None:
        out.mul_(variant.v_scale)
    return out if lse is None else (out, lse)
