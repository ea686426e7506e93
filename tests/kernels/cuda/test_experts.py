"""Mixtures of experts by the CUDA kernels: choices against float64, products against the sums of each token's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.linear.dequantise import dequantised
from allspan.kernels.cuda.moe.product import expert_gated_linear, expert_linear, expert_sum
from allspan.kernels.cuda.moe.route import route
from allspan.kernels.cuda.moe.rows import expert_gated_mul, expert_gather, linear, scale_rows
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.elementwise import gated
from allspan.kernels.reference.experts import choose
from allspan.kernels.reference.packed_linear import pack, unpack
from allspan.kernels.router_spec import RouterSpec
from support.emulator.driver import EmulatorDriver
from support.linear_cases import spec_of
from support.packed_cases import random_weight

SPECS = {
    "softmax": RouterSpec(4),
    "normalised": RouterSpec(8, normalises=True),
    "sigmoid": RouterSpec(4, "sigmoid", normalises=True, epsilon=1e-20, scale=2.5),
    "groups by two": RouterSpec(6, "sigmoid", 4, 2, normalises=True, scale=1.8),
    "groups by one": RouterSpec(3, "softmax", 4, 2, "max", scale=16.0),
    "chosen": RouterSpec(4, "softmax_of_chosen"),
    "all": RouterSpec(40),
}
EXPERTS = 40


def empty_routing(rows: int, top_k: int, places: int, device: str) -> Routing[Tensor]:
    """Filled with what no op may leave there."""
    integers = [torch.full((rows, top_k), -9, dtype=torch.int32, device=device) for _ in range(2)]
    starts = torch.full((1, places + 1), -9, dtype=torch.int32, device=device)
    return Routing(integers[0], torch.full((rows, top_k), -9.0, device=device), integers[1], starts)


def everywhere(experts: int) -> Tensor:
    return torch.arange(experts, dtype=torch.int32)[None]


def routed(logits: Tensor, spec: RouterSpec, bias: Tensor | None, places: Tensor, device: str) -> Routing[Tensor]:
    routing = empty_routing(len(logits), spec.top_k, int(places.max()) + 1, device)
    route(logits.to(device), None if bias is None else bias.to(device), places.to(device), spec, routing)
    return Routing(*(each.cpu() for each in routing))


def assert_sorted(routing: Routing[Tensor]) -> None:
    starts, flat = routing.starts[0].tolist(), routing.places.flatten()
    own = torch.nonzero(flat >= 0).flatten()
    expected = own[flat[own].sort(stable=True).indices]
    assert starts == [int((flat[own] < place).sum()) for place in range(len(starts))]
    assert torch.equal(routing.slots.flatten()[: len(own)].long(), expected)
    for row in routing.places.tolist():
        assert row == sorted(row, key=lambda place: (place < 0, place))


@pytest.mark.parametrize("name", SPECS)
def test_choices_and_weights_are_those_of_float64(name: str, device: str) -> None:
    spec = SPECS[name]
    for rows in (1, 33, 129):
        generator = torch.Generator().manual_seed(rows)
        logits = torch.randn(rows, EXPERTS, generator=generator) * 3
        bias = torch.randn(EXPERTS, generator=generator) if spec.score == "sigmoid" else None
        chosen, weights = choose(logits.double(), None if bias is None else bias.double(), spec)
        routing = routed(logits, spec, bias, everywhere(EXPERTS), device)
        ascending = chosen.sort(1)
        assert torch.equal(routing.places.long(), ascending.values)
        expected = weights.gather(1, ascending.indices)
        torch.testing.assert_close(routing.weights.double(), expected, rtol=2e-6, atol=1e-7)
        assert_sorted(routing)


@pytest.mark.parametrize("places", [3, 130, 300])
def test_many_slots_are_sorted_by_several_blocks(places: int, device: str) -> None:
    spec = RouterSpec(2)
    for rows in (2048, 2600):
        logits = torch.randn(rows, places + 1, generator=torch.Generator().manual_seed(rows))
        logits[: rows // 2, places - 1] += 20
        where = everywhere(places + 1)
        where[0, places] = -1
        assert_sorted(routed(logits, spec, None, where, device))


def test_ties_biases_groups_and_nans(device: str) -> None:
    logits = torch.zeros(4, EXPERTS)
    logits[1, 7:] = 1.0
    logits[2, :20] = -0.0
    logits[3, 39] = torch.nan
    routing = routed(logits, RouterSpec(3), None, everywhere(EXPERTS), device)
    assert routing.places.tolist() == [[0, 1, 2], [7, 8, 9], [0, 1, 2], [0, 1, 2]]
    assert routing.weights.isnan().all(1).tolist() == [False, False, False, True]

    logits, bias = torch.full((1, EXPERTS), -18.0), torch.zeros(EXPERTS)
    bias[[3, 30]] = 12.0
    logits[0, 3], logits[0, 30] = -18.5, -17.5
    routing = routed(logits, RouterSpec(2, "sigmoid"), bias, everywhere(EXPERTS), device)
    assert routing.places.tolist() == [[3, 30]]
    expected = torch.tensor([-18.5, -17.5]).double().sigmoid()
    torch.testing.assert_close(routing.weights[0].double(), expected, rtol=1e-6, atol=0)

    bias = torch.full((EXPERTS,), -12.0)
    bias[10:20] = -11.0
    spec = RouterSpec(4, "sigmoid", 4, 1)
    routing = routed(torch.zeros(1, EXPERTS), spec, bias, everywhere(EXPERTS), device)
    assert routing.places.tolist() == [[10, 11, 12, 13]]


@pytest.mark.parametrize("experts", [8, 60, 128, 512])
def test_ranks_and_copies_share_out_what_one_would_do(experts: int, device: str) -> None:
    logits = torch.randn(140, experts, generator=torch.Generator().manual_seed(2))
    spec = RouterSpec(4, normalises=True)
    whole = routed(logits, spec, None, everywhere(experts), device)
    found: list[dict[int, float]] = [{} for _ in logits]
    third = experts // 3
    for first, count in ((0, third), (third, third), (2 * third, experts - 2 * third)):
        places = torch.full((2, experts), -1, dtype=torch.int32)
        places[:, first : first + count] = torch.arange(count, dtype=torch.int32)
        routing = routed(logits, spec, None, places, device)
        assert_sorted(routing)
        for row, own, weights in zip(found, routing.places.tolist(), routing.weights.tolist(), strict=True):
            row.update({place + first: weight for place, weight in zip(own, weights, strict=True) if place >= 0})
    expected = zip(whole.places.tolist(), whole.weights.tolist(), strict=True)
    assert found == [dict(zip(*row, strict=True)) for row in expected]


@pytest.mark.parametrize("tokens", [9, 140])
def test_tokens_of_each_expert_are_counted_without_padding(tokens: int, device: str) -> None:
    logits, rows = torch.randn(tokens, EXPERTS), torch.arange(tokens, dtype=torch.int32)
    logits[4], rows[4:6] = torch.nan, -1
    places = everywhere(EXPERTS)
    places[0, 20:] = -1
    chosen = choose(logits, None, RouterSpec(3))[0][rows >= 0]
    routing, load = empty_routing(tokens, 3, 20, device), torch.full((EXPERTS,), 2**40, device=device)
    route(logits.to(device), None, places.to(device), RouterSpec(3), routing, load, rows.to(device))
    assert torch.equal(load.cpu() - 2**40, torch.bincount(chosen.flatten(), minlength=EXPERTS))
    assert (routing.places[4:6] == -1).all()
    assert int(routing.starts[0, -1]) == int((chosen < 20).sum())


@pytest.mark.parametrize("rows", [33, 70, 256])
def test_clusters_of_blocks_choose_as_one_does(rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(modules, "driver", lambda: EmulatorDriver(capability=(9, 0)))
    logits, spec = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(rows)), SPECS["normalised"]
    chosen, weights = choose(logits.double(), None, spec)
    ascending = chosen.sort(1)
    routing = routed(logits, spec, None, everywhere(EXPERTS), device)
    assert torch.equal(routing.places.long(), ascending.values)
    expected = weights.gather(1, ascending.indices)
    torch.testing.assert_close(routing.weights.double(), expected, rtol=2e-6, atol=1e-7)
    assert_sorted(routing)


def some_routing(kind: str, rows: int, top_k: int, places: int, device: str) -> Routing[Tensor]:
    """ "spread" over all places with some of other ranks, all to the "last" ones, or "none" here."""
    generator = torch.Generator().manual_seed(rows)
    logits, where = torch.randn(rows, places + 2, generator=generator), everywhere(places + 2)
    if kind == "last":
        logits[:, places - top_k : places] += 100
    where[where >= (0 if kind == "none" else places)] = -1
    routing = empty_routing(rows, top_k, places, device)
    route(logits.to(device), None, where.to(device), RouterSpec(top_k, normalises=True), routing)
    return routing


FORMATS = [
    ("bf16", 0),
    ("f16", 0),
    ("channel8", 0),
    ("channel4", 0),
    ("group8", 64),
    ("group4", 32),
    ("group4", 128),
    ("fp8", 0),
    ("fp8_block", 0),
    ("q8_0", 0),
    ("q4_0", 0),
    ("mxfp4", 0),
]
ROUTINGS = [("spread", 1), ("spread", 9), ("last", 33), ("spread", 129), ("none", 5), ("last", 127)]


class Experts:
    """Random weights of some experts, and float64 what they hold."""

    def __init__(self, spec: PackedSpec, places: int, device: str) -> None:
        self.spec = spec
        weights = [random_weight(spec, place) for place in range(places)]
        self.weight = torch.stack(weights).to(device)
        self.values = torch.stack([unpack(weight, spec, torch.float64) for weight in weights])
        generator = torch.Generator().manual_seed(1)
        self.bias = torch.randn(places, spec.features, generator=generator)

    def product(self, x: Tensor, place: int) -> Tensor:
        return self.values[place] @ x.double() + self.bias[place]


@pytest.mark.parametrize(("name", "group"), FORMATS)
def test_products_are_those_of_each_token_and_expert(name: str, group: int, device: str) -> None:
    inputs, width, hidden, top_k, places = 256, 40, 72, 2, 5
    dtype = torch.float16 if name in ("f16", "q4_0") else torch.bfloat16
    tolerance = 2e-3 if dtype is torch.float16 else 1e-2
    up = Experts(spec_of(name, group, (width, width), inputs), places, device)
    offset = 32 if group or name == "fp8_block" else 0
    down = Experts(spec_of(name, group, (hidden,), 248, offset), places, device)
    for kind, rows in ROUTINGS:
        if device == "cuda" and up.spec.kind.is_e4m3 and rows > 9:
            continue  # x becomes e4m3, too: test_grouped_sm90.py
        routing = some_routing(kind, rows, top_k, places, device)
        activation = "silu" if rows % 2 else "clamped_swiglu"
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        mlp = torch.randn(rows, top_k, 248, generator=generator).to(dtype)
        expected = torch.full((rows, top_k, width), 7.0, dtype=torch.float64)
        plain = torch.full((rows, top_k, 2 * width + 3), 7.0, dtype=torch.float64)
        total = torch.zeros(rows, hidden, dtype=torch.float64)
        weights = routing.weights.cpu().double()
        for row, own in enumerate(routing.places.tolist()):
            for j, place in enumerate(own):
                if place >= 0:
                    product = up.product(x[row], place)
                    plain[row, j, 1 : 1 + 2 * width] = product
                    gate, upper = product.chunk(2)
                    expected[row, j] = gated(gate[None], activation, upper[None])[0]
                    total[row] += weights[row, j] * down.product(mlp[row, j], place)
        x, mlp, bias = x.to(device), mlp.to(device), up.bias.to(device)
        out = torch.full(expected.shape, 7.0, dtype=dtype, device=device)
        expert_gated_linear(x, up.weight, bias, up.spec, activation, routing, out)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=4 * tolerance)
        for kept in (dtype, torch.float32):
            out = torch.full(plain.shape, 7.0, dtype=kept, device=device)
            expert_linear(x, up.weight, bias, up.spec, 1, routing, out)
            torch.testing.assert_close(out.cpu().double(), plain, rtol=tolerance, atol=tolerance)
            if rows != 9:
                continue
            by_slot = torch.full(plain.shape, 7.0, dtype=kept, device=device)
            own = x[:, None].expand(rows, top_k, inputs).contiguous()
            expert_linear(own, up.weight, bias, up.spec, 1, routing, by_slot)
            torch.testing.assert_close(by_slot, out, rtol=0, atol=0)
        for adds, kept in ((False, dtype), (True, torch.float32)):
            out = torch.full(total.shape, 0.5, dtype=kept, device=device)
            expert_sum(mlp, down.weight, down.bias.to(device), down.spec, routing, adds, out)
            torch.testing.assert_close(out.cpu().double(), total + 0.5 * adds, rtol=tolerance, atol=2 * tolerance)


def test_every_exponent_of_mxfp4_is_its_power_of_two(device: str) -> None:
    spec = spec_of("mxfp4", 0, (9,), 32 * 253)
    codes = torch.randint(0, 16, (9, spec.inputs), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    weight = pack(spec, {"codes": codes, "e": torch.arange(253, dtype=torch.uint8).expand(9, 253)})
    found = dequantised(weight.to(device), spec, torch.bfloat16)[:, : spec.inputs]
    assert torch.equal(found.cpu().double(), unpack(weight, spec, torch.float64))


@pytest.mark.parametrize(("name", "group"), [("group4", 32), ("channel8", 0)])
def test_experts_may_begin_between_16_bytes(name: str, group: int, device: str) -> None:
    experts = Experts(spec_of(name, group, (5,), 96), 3, device)
    assert experts.spec.shape[0] * experts.spec.shape[1] % 16
    routing = some_routing("spread", 4, 2, 3, device)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.full((4, 2, 5), 7.0, device=device)
    expert_linear(x.to(device), experts.weight, experts.bias.to(device), experts.spec, 0, routing, out)
    for row, own in enumerate(routing.places.tolist()):
        for j, place in enumerate(own):
            expected = experts.product(x[row], place) if place >= 0 else torch.full((5,), 7.0, dtype=torch.float64)
            torch.testing.assert_close(out[row, j].cpu().double(), expected, rtol=1e-2, atol=1e-2)


def test_other_ops_agree_with_their_definitions(device: str) -> None:
    generator = torch.Generator().manual_seed(5)
    routing = some_routing("spread", 7, 2, 5, device)
    gate_up = torch.randn(7, 2, 2 * 24, generator=generator).bfloat16().to(device)
    out = torch.full((7, 2, 24), 7.0, device=device)
    for activation in ("gelu_tanh", "clamped_swiglu"):
        expert_gated_mul(gate_up, activation, routing, out)
        expected = gated(gate_up[..., :24].float(), activation, gate_up[..., 24:].float())
        expected = torch.where((routing.places >= 0)[..., None], expected, 7.0)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    x = torch.randn(7, 30, generator=generator).bfloat16().to(device)
    columns = torch.stack([torch.randperm(30, generator=generator) for _ in range(5)]).int().to(device)
    for rows in (x, x[:, None].expand(7, 2, 30).contiguous()):
        gathered = torch.full((7, 2, 30), 7.0, device=device).bfloat16()
        expert_gather(rows, columns, routing, gathered)
        ordered = x[:, columns[routing.places.long()].long()].diagonal().permute(2, 0, 1)
        expected = torch.where((routing.places >= 0)[..., None], ordered, 7.0)
        torch.testing.assert_close(gathered, expected.bfloat16(), rtol=0, atol=0)
    logits = torch.randn(7, 1, generator=generator).to(device)
    right = (x.double() * logits.double().sigmoid()).bfloat16()
    scale_rows(x, logits)
    torch.testing.assert_close(x, right, rtol=1e-2, atol=0)


@pytest.mark.parametrize("rows", [1, 11, 65])
@pytest.mark.parametrize("inputs", [64, 2100])
def test_a_router_multiplies_in_float32(rows: int, inputs: int, device: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weight, bias = torch.randn(9, inputs, generator=generator), torch.randn(9, generator=generator)
    out = torch.zeros(rows, 9, device=device)
    linear(x.to(device), weight.to(device), bias.to(device), out)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-4)


def _refused(change: dict[int, Any], device: str) -> None:
    routing = empty_routing(4, 2, 5, device)
    arguments: list[Any] = [torch.zeros(4, 5), None, everywhere(5), RouterSpec(2), routing]
    for place, value in change.items():
        arguments[place] = value
    route(*(each.to(device) if isinstance(each, Tensor) else each for each in arguments))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({3: RouterSpec(6)}, "routing.places"),
        ({3: RouterSpec(2, groups=2)}, "groups"),
        ({3: RouterSpec(2, "cosine")}, "score that is none"),
        ({0: torch.zeros(3, 5)}, "routing.places"),
    ],
)
def test_arguments_that_would_lead_outside_are_refused(change: dict[int, Any], says: str, device: str) -> None:
    with pytest.raises(ValueError, match=says):
        _refused(change, device)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_product_that_asks_early_meets_the_routing_that_is_made_meanwhile(rows: int, device: str) -> None:
    """On a GPU weights are asked for by the routing before."""
    up = Experts(spec_of("bf16", 0, (64, 64), 256), EXPERTS, device)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    routing = empty_routing(rows, 4, EXPERTS, device)
    places = everywhere(EXPERTS).to(device)
    for turn in range(20 if device == "cuda" else 2):
        logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(turn)).to(device)
        found = [torch.full((rows, 4, 64), torch.nan, device=device) for _ in range(2)]
        for is_settled, out in enumerate(found):
            route(logits.flip(1), None, places, RouterSpec(4), routing)
            route(logits, None, places, RouterSpec(4), routing)
            expert_gated_linear(x, up.weight, None, up.spec, "silu", routing, out, bool(is_settled))
        assert torch.equal(*found)
        assert not found[0].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 70])
def test_a_graph_captured_under_one_routing_is_right_under_the_opposite(rows: int) -> None:
    places, top_k = 8, 2
    up = Experts(spec_of("bf16", 0, (48, 48), 128), places, "cuda")
    down = Experts(spec_of("bf16", 0, (64,), 48), places, "cuda")
    x = torch.randn(rows, 128, device="cuda").bfloat16()
    logits, routing = torch.zeros(rows, places, device="cuda"), empty_routing(rows, top_k, places, "cuda")
    mlp, out = torch.zeros(rows, top_k, 48, device="cuda").bfloat16(), torch.zeros(rows, 64, device="cuda")
    again, numbers = torch.zeros_like(out), torch.zeros(rows, dtype=torch.int32, device="cuda")
    where = everywhere(places).cuda()

    def run() -> None:
        route(logits, None, where, RouterSpec(top_k), routing, None, numbers)
        expert_gated_linear(x, up.weight, None, up.spec, "silu", routing, mlp)
        expert_sum(mlp, down.weight, None, down.spec, routing, False, out)
        route(-logits, None, where, RouterSpec(top_k), routing, None, numbers)
        expert_sum(mlp, down.weight, None, down.spec, routing, False, again)  # may begin before its routing is there

    def settle(values: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        logits.copy_(values)
        numbers.fill_(0)[rows - padding :] = -1
        torch.cuda.synchronize()
        return out, again

    one = torch.full((rows, places), -5.0, device="cuda")
    one[:, :2] = 5.0  # all rows go to two experts
    other = torch.randn(rows, places, device="cuda")
    cases = [(other, 0), (one, 0), (torch.flip(one, (1,)), 0), (other, rows // 2), (one, rows)]
    expected = []
    for case in cases:
        settle(*case)
        run()
        expected.append((out.clone(), again.clone()))
        assert (out[rows - case[1] :] == 0).all()
    settle(*cases[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case, right in zip(cases, expected, strict=True):
        settle(*case)
        graph.replay()
        assert torch.equal(out, right[0])
        assert torch.equal(again, right[1])
