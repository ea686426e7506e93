"""The engine's attention on a GPU: decode and prefill kernels for the requests of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allspan.kernels.cuda.attention import prefill_sm90
from allspan.kernels.cuda.attention.cascade import CascadeLevel, CascadeWorkspace, paged_cascade
from allspan.kernels.cuda.attention.decode import MOST_GROUP, DecodeWorkspace, paged_decode
from allspan.kernels.cuda.attention.prefill import PrefillPlan, paged_prefill
from allspan.kernels.cuda.attention.prefill_sm90 import paged_prefill_sm90
from allspan.kernels.cuda.cache.pages import MOST_HEAD_DIM, QUERIES, PageTable, Scores
from allspan.kernels.cuda.jit.modules import gpu
from allspan.kernels.cuda.latent.expand import Expanded

HEAD_STEPS = {"bfloat16": 16, "float16": 16, "int8": 32, "uint4": 64}
"""What a head's size must be a multiple of, up to MOST_HEAD_DIM, by the format of the pages."""


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What `attention` takes for its `meta`. Requests with one new token come first, and each is a row of the step."""

    decodes: PageTable | None
    prefills: tuple[PageTable, PrefillPlan] | None
    scores: Scores
    """All but the sinks, which are each layer's own."""
    workspace: DecodeWorkspace
    shared: tuple[CascadeLevel, CascadeWorkspace] | None = None
    """Tokens that the decodes share: their table has the others alone."""
    expanded: Expanded | None = None
    """Further requests, whose keys and values are made of latents."""


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    sinks: Tensor | None,
    meta: StepAttention,
    out: Tensor,
) -> None:
    """See `allspan.kernels.ops.OpSet.attention`. q and out of 16 bits; rows of `out` that no request has are left."""
    scores = meta.scores if sinks is None else replace(meta.scores, sinks=sinks)
    cache = k_cache, v_cache, k_scales, v_scales
    if meta.decodes is not None:
        count = len(meta.decodes.kv_lens)
        if meta.shared is None:
            paged_decode(q[:count], cache, meta.decodes, scores, out[:count], None, meta.workspace)
        else:
            level, workspace = meta.shared
            paged_cascade(q[:count], cache, [level], meta.decodes, scores, out[:count], None, workspace)
    if meta.prefills is not None:
        table, plan = meta.prefills
        if _runs_on_hopper(k_cache, q.device):
            paged_prefill_sm90(q, (k_cache, v_cache), table, plan, scores, True, out, None)
        else:
            paged_prefill(q, cache, table, plan, scores, True, out, None)


def runs(head_dim: int, group: int, pages: str) -> bool:
    """Whether the kernels are for this head size, so many query heads a KV head, and this format of pages."""
    is_whole = pages in HEAD_STEPS and head_dim % HEAD_STEPS[pages] == 0
    return is_whole and head_dim <= MOST_HEAD_DIM and group <= MOST_GROUP


def _runs_on_hopper(cache: Tensor, device: torch.device) -> bool:
    is_made_for = cache.dtype in QUERIES and cache.shape[3] in prefill_sm90.HEAD_DIMS
    return (
        is_made_for and cache.shape[2] >= prefill_sm90.LEAST_PAGE and gpu(device).capability == prefill_sm90.CAPABILITY
    )
