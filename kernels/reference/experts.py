"""Mixtures of experts in plain torch: the choice of experts, and their products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from allspan.kernels.fused_ops import ExpertChoice, RouterProduct, RowNorm
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.elementwise import gated, rms_norm
from allspan.kernels.reference.linear import linear
from allspan.kernels.reference.packed_linear import product
from allspan.kernels.router_spec import GROUP_SCORES, SCORES, RouterSpec


def route(
    logits: Tensor,
    bias: Tensor | None,
    places: Tensor,
    spec: RouterSpec,
    routing: Routing[Tensor],
    load: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """See `OpSet.route`."""
    chosen, weights = choose(logits.float(), bias, spec)
    is_token = torch.ones_like(chosen[:, 0], dtype=torch.bool) if rows is None else rows >= 0
    weights = torch.where(is_token[:, None], weights, 0.0)
    if load is not None:
        load += torch.bincount(chosen[is_token].flatten(), minlength=len(load))
    copies = chosen.sum(1, keepdim=True) % len(places)
    own = torch.where(is_token[:, None], places[copies, chosen].long(), -1)
    num_places = routing.starts.shape[1] - 1
    keys = torch.where(own < 0, num_places, own)
    order = keys.sort(dim=1, stable=True)
    routing.places.copy_(torch.where(order.values == num_places, -1, order.values))
    routing.weights.copy_(weights.gather(1, order.indices))
    sort_slots(order.values, routing)


def norm_route(
    residual: Tensor,
    norm: RowNorm[Tensor],
    x: Tensor,
    product: RouterProduct[Tensor],
    choice: ExpertChoice[Tensor],
    routing: Routing[Tensor],
    load: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """See `FusedOps.norm_route`."""
    rms_norm(residual, norm.weight, norm.eps, x)
    linear(x, product.weight, product.bias, product.logits)
    route(product.logits, choice.bias, choice.places, choice.spec, routing, load, rows)


def choose(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """The experts of each token, int64 [n, k], the best choice first, and their weights, [n, k]; in the dtype of
    logits, which may be float64."""
    if spec.score not in SCORES or spec.group_score not in GROUP_SCORES:
        raise ValueError(f"router: {spec} has a score that is none of {', '.join(SCORES + GROUP_SCORES)}")
    is_bad = logits.isnan().any(1, keepdim=True)
    logits = torch.where(is_bad, 0.0, logits)
    scores = {"softmax": lambda: logits.softmax(1), "sigmoid": logits.sigmoid}.get(spec.score, lambda: logits)()
    choices = scores if bias is None else scores + bias
    if spec.groups > 1:
        choices = choices.masked_fill(~_kept(choices, spec), -torch.inf)
    chosen = choices.sort(dim=1, descending=True, stable=True).indices[:, : spec.top_k]
    chosen = torch.where(is_bad, torch.arange(spec.top_k, device=logits.device), chosen)
    weights = scores.gather(1, chosen)
    if spec.score == "softmax_of_chosen":
        weights = weights.softmax(1)
    if spec.normalises:
        weights = weights / (weights.sum(1, keepdim=True) + spec.epsilon)
    return chosen, torch.where(is_bad, torch.nan, weights * spec.scale)


def _kept(choices: Tensor, spec: RouterSpec) -> Tensor:
    """bool [n, E]: whether an expert is of a group that is kept."""
    grouped = choices.reshape(len(choices), spec.groups, -1)
    best = min(2, grouped.shape[2]) if spec.group_score == "two_best" else 1
    worth = grouped.topk(best, 2).values.sum(2)
    kept = worth.sort(dim=1, descending=True, stable=True).indices[:, : spec.kept_groups]
    return torch.zeros_like(worth, dtype=torch.bool).scatter(1, kept, True).repeat_interleave(grouped.shape[2], 1)


def expert_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    column: int,
    routing: Routing[Tensor],
    out: Tensor,
) -> None:
    """See `OpSet.expert_linear`."""
    rows = out.view(-1, out.shape[2])
    for place, slots in slots_by_place(routing):
        own = _rows_of(x, slots, out.shape[1])
        found = product(own, weight[place], None if bias is None else bias[place], spec)
        rows[slots, column : column + spec.features] = found.to(out.dtype)


def expert_gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    activation: str,
    routing: Routing[Tensor],
    out: Tensor,
    is_settled: bool = False,
) -> None:
    """See `OpSet.expert_gated_linear`."""
    gate_up = torch.zeros(*out.shape[:2], spec.features, device=out.device)
    expert_linear(x, weight, bias, spec, 0, routing, gate_up)
    expert_gated_mul(gate_up, activation, routing, out)


def expert_gather(x: Tensor, columns: Tensor, routing: Routing[Tensor], out: Tensor) -> None:
    """See `OpSet.expert_gather`."""
    rows = out.view(-1, out.shape[2])
    for place, slots in slots_by_place(routing):
        rows[slots] = _rows_of(x, slots, out.shape[1])[:, columns[place].long()]


def expert_gated_mul(gate_up: Tensor, activation: str, routing: Routing[Tensor], out: Tensor) -> None:
    """See `OpSet.expert_gated_mul`."""
    gate, up = gate_up.chunk(2, dim=2)
    out.copy_(torch.where((routing.places >= 0).unsqueeze(2), gated(gate, activation, up), out))


def expert_sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    routing: Routing[Tensor],
    adds: bool,
    out: Tensor,
) -> None:
    """See `OpSet.expert_sum`."""
    total = torch.zeros(out.shape, device=out.device)
    rows, weights = x.view(-1, x.shape[2]), routing.weights.view(-1, 1)
    for place, slots in slots_by_place(routing):
        found = product(rows[slots], weight[place], None if bias is None else bias[place], spec)
        total[slots // x.shape[1]] += weights[slots] * found
    out.copy_(out + total if adds else total)


def scale_rows(x: Tensor, logits: Tensor) -> None:
    """See `OpSet.scale_rows`."""
    x.copy_(x.float() * logits.float().sigmoid())


def sort_slots(keys: Tensor, routing: Routing[Tensor]) -> None:
    """Fills `slots` and `starts`: keys [n, k] are the places, with their number for a choice that has none."""
    by_place = keys.flatten().sort(stable=True)
    routing.slots.view(-1).copy_(by_place.indices)
    places = torch.arange(routing.starts.shape[1], device=keys.device)
    routing.starts[0] = torch.searchsorted(by_place.values, places)


def slots_by_place(routing: Routing[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Returns each place that a token goes to, and its slots."""
    starts, slots = routing.starts[0].tolist(), routing.slots.view(-1).long()
    for place in range(len(starts) - 1):
        if starts[place] < starts[place + 1]:
            yield place, slots[starts[place] : starts[place + 1]]


def _rows_of(x: Tensor, slots: Tensor, top_k: int) -> Tensor:
    """What the slots read: their tokens' rows, or of x [n, k, K] their own."""
    return x[slots // top_k] if x.dim() == 2 else x.view(-1, x.shape[2])[slots]
