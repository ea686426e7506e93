"""The choice of experts and the sort by place, on a GPU: route.cu. One kernel up to 32 rows, or 256 where thread blocks
come in clusters (sm_90 and later), else two or, with many slots, three."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, gpu, kernel, launch
from allspan.kernels.cuda.moe.sort import sort_slots
from allspan.kernels.cuda.rows.arguments import check
from allspan.kernels.fused_ops import ExpertChoice
from allspan.kernels.ops import Routing
from allspan.kernels.router_spec import GROUP_SCORES, SCORES, RouterSpec

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_MOST_ROWS = 32
"""Rows of a thread block."""
_CLUSTER, _FEW = 8, 8
"""Blocks of a cluster, and rows for which one block chooses as fast as a cluster would."""
_LEAST_SHARED = 4096
"""Slots from which on several blocks sort them."""
_MOST_CHOICES, _MOST_GROUPS, WARPS = 64, 32, 32
EACH = (1, 2, 4, 8, 16)
"""Logits of a lane."""
_ROUTER = struct.Struct("=8i2f")


def route(
    logits: Tensor,
    bias: Tensor | None,
    places: Tensor,
    spec: RouterSpec,
    routing: Routing[Tensor],
    load: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """See `OpSet.route`. Raises ValueError for what the kernels would read or write past, and for more than 512
    experts, 64 choices or 32 groups."""
    n, experts = logits.shape
    choice = ExpertChoice(bias, places, spec)
    check_route(logits, choice, routing, load, rows)
    if n == 0:
        routing.starts.zero_()
        return
    each = next(each for each in EACH if experts <= 32 * each)
    num_places, total = routing.starts.shape[1] - 1, n * spec.top_k
    router = packed_router(choice, experts)
    sizes = np.int32(n), router, np.int32(num_places)
    given = (logits, bias, places, rows, load, *sizes, routing.places, routing.weights)
    sorted_into = routing.slots, routing.starts
    has_clusters = gpu(logits.device).capability >= (9, 0)
    cluster = _CLUSTER if n > _FEW and has_clusters else 1
    stretch = -(-n // cluster)
    of_warp = 4 * spec.top_k + 32 * each
    if stretch <= _MOST_ROWS:
        warps = min(WARPS, max(stretch, -(-num_places // 32)))
        shared = 4 * (WARPS + 2 * num_places + stretch * spec.top_k + warps * of_warp)
        launch(_kernel("route", each, cluster), (cluster,), 32 * warps, (*given, *sorted_into), shared, is_early=True)
        return
    launch(_kernel("choose", each), (-(-n // 8),), 256, given, 8 * 4 * of_warp, is_early=True)
    if total >= _LEAST_SHARED:
        sort_slots(routing)
        return
    arguments = (routing.places, np.int32(total), np.int32(num_places), *sorted_into)
    launch(_kernel("sort", each), (1,), 32 * WARPS, arguments, 4 * (WARPS + 1) * num_places, is_early=True)


def packed_router(choice: ExpertChoice[Tensor], experts: int) -> bytes:
    """Returns the struct Router of choose.cuh."""
    spec = choice.spec
    score, normalises = SCORES.index(spec.score), spec.normalises
    if spec.score == "softmax" and normalises and not spec.epsilon and choice.bias is None and spec.groups == 1:
        score, normalises = SCORES.index("softmax_of_chosen"), False  # the same, without the sum over all experts
    return _ROUTER.pack(
        experts, len(choice.places), spec.top_k, score, spec.groups, spec.kept_groups,
        GROUP_SCORES.index(spec.group_score), normalises, spec.epsilon, spec.scale,
    )  # fmt: skip


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for each in EACH:
        yield from (_kernel(name, each) for name in ("route", "choose", "sort"))
        if capability >= (9, 0):
            yield _kernel("route", each, _CLUSTER)


def _kernel(name: str, each: int, cluster: int = 1) -> Kernel:
    return kernel("moe/route.cu", name, EACH=each, CLUSTER=cluster)


def check_route(
    logits: Tensor,
    choice: ExpertChoice[Tensor],
    routing: Routing[Tensor],
    load: Tensor | None,
    rows: Tensor | None,
) -> None:
    """Raises ValueError for what the kernels would read or write past."""
    (n, experts), (bias, places, spec) = logits.shape, choice
    if load is not None:
        check("load", load, [torch.int64], (experts,))
    if rows is not None:
        check("rows", rows, [torch.int32], (n,))
    check("logits", logits, [torch.float32], (n, experts))
    check("places", places, [torch.int32], (len(places), experts))
    if bias is not None:
        check("bias", bias, [torch.float32], (experts,))
    for name, tensor, dtype in (
        ("routing.places", routing.places, torch.int32),
        ("routing.weights", routing.weights, torch.float32),
        ("routing.slots", routing.slots, torch.int32),
    ):
        check(name, tensor, [dtype], (n, spec.top_k))
    check("routing.starts", routing.starts, [torch.int32], (1, routing.starts.shape[1]))
    if spec.score not in SCORES or spec.group_score not in GROUP_SCORES:
        raise ValueError(f"router: {spec} has a score that is none of {', '.join(SCORES + GROUP_SCORES)}")
    if not 1 <= spec.top_k <= min(experts, _MOST_CHOICES) or experts > 32 * EACH[-1]:
        raise ValueError(
            f"router: top_k must be from 1 to {min(experts, _MOST_CHOICES)} of at most 512 experts: {spec}"
        )
    if not 1 <= spec.groups <= _MOST_GROUPS or experts % spec.groups or not 1 <= spec.kept_groups <= spec.groups:
        raise ValueError(
            f"router: {spec.groups} groups, {spec.kept_groups} kept, are not at most 32 of {experts} experts"
        )
