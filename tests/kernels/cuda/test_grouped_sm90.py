"""Hopper's products of many rows with weights of experts, against those of each token and expert in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.linear.call import GATED, GATED_SILU
from allspan.kernels.cuda.linear.quantise_input import quantise_rows
from allspan.kernels.cuda.moe import grouped_sm90 as module
from allspan.kernels.cuda.moe.grouped_sm90 import Grouped, fits, multiply, takes
from allspan.kernels.cuda.moe.product import expert_gated_linear, expert_sum
from allspan.kernels.cuda.moe.rows import sum_choices
from allspan.kernels.ops import Routing
from allspan.kernels.reference.elementwise import gated
from allspan.kernels.reference.packed_linear import unpack
from support.emulator.driver import EmulatorDriver
from support.linear_cases import spec_of
from support.packed_cases import random_weight

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def emulator() -> EmulatorDriver:
    return EmulatorDriver(multiprocessors=2, capability=(9, 0))


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """Its instructions are no other GPU's."""
    is_real = request.node.get_closest_marker("gpu") is not None
    if is_real and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")


def sorted_routing(places: Tensor, count: int, device: str) -> Routing[Tensor]:
    """places [n, k], in each row ascending, -1 last."""
    flat = torch.where(places < 0, count, places).flatten()
    order = flat.sort(stable=True)
    slots = torch.where(order.values == count, 1 << 30, order.indices)  # what is behind those that count
    starts = torch.searchsorted(order.values, torch.arange(count + 1))
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(3)) + 0.5
    integers = (each.to(torch.int32).contiguous().to(device) for each in (places, slots.view_as(places), starts[None]))
    chosen, by_place, begins = integers
    return Routing(chosen, weights.to(device), by_place, begins)


def routing_of(kind: str, rows: int, top_k: int, places: int, device: str) -> Routing[Tensor]:
    """ "spread" over all but place 1, with some slots of other ranks; all to the "last"; "none" here."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.rand(rows, places + 2, generator=generator)
    scores[:, 1] = -1
    chosen = scores.topk(top_k, 1).indices.sort(1).values
    if kind == "last":
        chosen = torch.arange(places - top_k, places).expand(rows, top_k)
    is_here = (chosen < places) & (kind != "none")
    return sorted_routing(torch.where(is_here, chosen, -1), places, device)


def of_e4m3(x: Tensor) -> Tensor:
    unit = x.abs().amax(1, keepdim=True).double() / 448
    return (x.double() / unit).float().to(torch.float8_e4m3fn).double() * unit


def check(
    name: str,
    sizes: tuple[int, int, int],
    routing: Routing[Tensor],
    dtype: torch.dtype,
    kept: torch.dtype,
    activation: str | None,
    has_own_rows: bool = False,
    k_offset: int = 0,
) -> None:
    """sizes: outputs, inputs, the group of scales. Rows of slots that have no place stay as they are, and so does what
    lies beside."""
    outputs, inputs, group = sizes
    (rows, top_k), device = routing.places.shape, routing.places.device
    parts = (outputs,) if activation is None else (outputs, outputs)
    spec, places = spec_of(name, group, parts, inputs, k_offset), routing.starts.shape[1] - 1
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows * (top_k if has_own_rows else 1), inputs, generator=generator).to(dtype).to(device)
    weight = torch.stack([random_weight(spec, place) for place in range(places)]).to(device)
    bias = torch.randn(places, spec.features, generator=generator).to(device) if rows % 2 else None
    beside = torch.full((rows * top_k, outputs + 16), 7.0, dtype=kept, device=device)
    out = beside[:, 8 : 8 + outputs]
    code = None if activation is None else GATED[activation]
    call = Grouped(x, weight, bias, spec, routing, out, code, has_own_rows)
    assert fits(call)
    multiply(call)
    if name.startswith("fp8"):
        x = torch.cat([of_e4m3(part) for part in x.split(128 if name == "fp8_block" else inputs, 1)], 1)
    expected = torch.full((rows * top_k, outputs), 7.0, dtype=torch.float64, device=device)
    of_slot = routing.places.flatten()
    for place in range(places):
        own = torch.nonzero(of_slot == place).flatten()
        values = unpack(weight[place], spec, torch.float64)
        product = x[own if has_own_rows else own // top_k].double() @ values.T
        product += 0 if bias is None else bias[place]
        if activation is not None:
            gate, up = product.chunk(2, 1)
            product = gated(gate, activation, up)
        expected[own] = product
    tolerance = 2e-3 if name == "f16" else 2e-2
    slack = 4
    if name.startswith("fp8") and device.type == "cuda":  # of sums of e4m3, tensor cores have some 14 bits
        slack = 50
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=slack * tolerance)
    out.fill_(7.0)
    assert (beside == 7.0).all()


CASES = [
    ("bf16", (136, 200, 0), ("spread", 150), BF16, BF16, "silu"),
    ("bf16", (264, 136, 0), ("last", 65), BF16, BF16, None),
    ("bf16", (40, 72, 0), ("spread", 7), BF16, F32, None),
    ("f16", (48, 88, 0), ("last", 129), F16, F16, "gelu_tanh"),
    ("group4", (40, 96, 32), ("spread", 33), BF16, BF16, "clamped_swiglu"),
    ("bf16", (40, 72, 0), ("none", 9), BF16, BF16, None),
    ("group4", (264, 384, 32), ("spread", 70), BF16, BF16, "silu"),
    ("group4", (136, 400, 128), ("last", 129), BF16, F32, None),
    ("group4", (40, 520, 64), ("spread", 7), F16, F16, None),
    ("q4_0", (40, 256, 0), ("last", 65), BF16, BF16, "silu"),
    ("mxfp4", (136, 480, 0), ("spread", 150), BF16, BF16, "clamped_swiglu"),
    ("mxfp4", (272, 384, 0), ("last", 127), BF16, F32, None),
    ("mxfp4", (40, 392, 0), ("spread", 9), F16, F16, None),
    ("channel4", (40, 264, 0), ("spread", 33), BF16, BF16, None),
    ("channel8", (136, 200, 0), ("spread", 33), F16, F16, "gelu_tanh"),
    ("group8", (40, 200, 64), ("last", 70), BF16, BF16, "silu"),
    ("q8_0", (264, 136, 0), ("spread", 33), BF16, F32, None),
    ("group8", (40, 200, 96), ("spread", 33), BF16, BF16, None),
    ("mxfp4", (40, 384, 0), ("none", 9), BF16, BF16, None),
    ("fp8", (136, 200, 0), ("spread", 70), BF16, BF16, "silu"),
    ("fp8", (40, 136, 0), ("last", 7), F16, F32, None),
    ("fp8_block", (72, 384, 0), ("spread", 70), BF16, BF16, "silu"),
    ("fp8_block", (136, 472, 0), ("last", 7), BF16, BF16, None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_each_token_and_expert(
    case: tuple[Any, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that are cut off at either side, of half the rows too; blocks with several; places without rows."""
    name, sizes, (kind, rows), *rest = case
    monkeypatch.setattr(module, "_MOST_SCRATCH", 40_000)  # of two places
    check(name, sizes, routing_of(kind, rows, 2, 5, device), *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 127, 128, 129, 1000, 8192])
def test_products_of_every_size_agree_with_float64(rows: int) -> None:
    for kind in ("spread", "last"):
        routing = routing_of(kind, rows, 4, 9, "cuda")
        check("bf16", (776, 512, 0), routing, BF16, BF16, "silu")
        check("bf16", (520, 776, 0), routing, BF16, F32, None, True)
        check("group4", (264, 512, 128), routing, BF16, BF16, "silu")
        check("mxfp4", (776, 480, 0), routing, BF16, BF16, "clamped_swiglu")
        check("channel8", (264, 520, 0), routing, BF16, F32, None, True)
        check("fp8", (264, 776, 0), routing, BF16, BF16, None)
        check("fp8_block", (264, 776, 0), routing, BF16, F32, None, True)


def test_rows_of_slots_meet_their_own_experts(device: str) -> None:
    check("bf16", (72, 104, 0), routing_of("spread", 41, 3, 4, device), BF16, BF16, None, has_own_rows=True)
    check("group8", (72, 96, 32), routing_of("spread", 11, 3, 4, device), BF16, F32, None, True, k_offset=32)


@pytest.mark.parametrize("kept", [BF16, F32])
def test_sums_of_products_in_16_bits(kept: torch.dtype, device: str) -> None:
    routing = routing_of("spread", 21, 11, 12, device)
    products = torch.randn(21, 11, 40, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    expected = products.double() * torch.where(routing.places >= 0, routing.weights.double(), 0.0)[..., None]
    products[routing.places < 0] = math.nan
    for adds in (False, True):
        out = torch.full((21, 40), 0.5, dtype=kept, device=device)
        sum_choices(products, routing, adds, out, BF16)
        tolerance = 1e-5 if kept is F32 else 1e-2
        torch.testing.assert_close(out.double(), expected.sum(1) + 0.5 * adds, rtol=tolerance, atol=tolerance)


def test_the_ops_take_it_from_some_slots_a_place_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the streaming kernel would have computed."""
    routing = routing_of("spread", 70, 2, 5, device)
    generator = torch.Generator().manual_seed(1)
    up, down = spec_of("bf16", 0, (72, 72), 96), spec_of("bf16", 0, (72,), 72)
    weights = [torch.stack([random_weight(spec, i) for i in range(5)]).to(device) for spec in (up, down)]
    x = torch.randn(70, 96, generator=generator).bfloat16().to(device)
    found = []
    for least in (16, 1 << 20):
        monkeypatch.setattr(module, "LEAST_SLOTS", least)
        mlp = torch.zeros(70, 2, 72, dtype=BF16, device=device)
        expert_gated_linear(x, weights[0], None, up, "silu", routing, mlp)
        out = torch.ones(70, 72, device=device)
        expert_sum(mlp, weights[1], None, down, routing, True, out)
        found.append((mlp, out))
        call = Grouped(x, weights[0], None, up, routing, mlp.view(140, 72), GATED_SILU)
        assert takes(call) == (least == 16)
    for new, old in zip(*found, strict=True):
        torch.testing.assert_close(new, old, rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_goes_elsewhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routing, spec = routing_of("spread", 70, 2, 5, device), spec_of("bf16", 0, (40, 40), 96)
    weight = torch.zeros(5, *spec.shape, dtype=torch.uint8, device=device)
    x, out = torch.zeros(70, 96, dtype=BF16, device=device), torch.zeros(140, 48, dtype=BF16, device=device)
    assert fits(Grouped(x, weight, None, spec, routing, out[:, :40], GATED_SILU))
    assert not fits(Grouped(x, weight, None, spec, routing, out[:, 1:41], GATED_SILU))
    assert not fits(Grouped(x, weight, None, spec, routing, out[:, :40].float(), GATED_SILU))
    if device == "cpu":
        monkeypatch.setattr(modules, "driver", EmulatorDriver)
        assert not fits(Grouped(x, weight, None, spec, routing, out[:, :40], GATED_SILU))


@pytest.mark.parametrize("inputs", [72, 2048, 2120])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_rows_of_x_are_codes_times_scales(inputs: int, dtype: torch.dtype, device: str) -> None:
    """Those that a warp holds, and longer ones; with zeros, and with what is not finite."""
    x = torch.randn(11, inputs, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x[3], x[4, 1] = 0, math.inf
    spec = spec_of("fp8" if dtype == torch.float8_e4m3fn else "channel8", 0, (8,), inputs)
    codes, scales, sums = quantise_rows(x, spec, dtype)
    in_order = codes.double().view(11, -1, 4, 2, 8).transpose(2, 3).reshape(11, -1)
    assert (in_order[:, inputs:] == 0).all()
    if dtype == torch.int8:
        torch.testing.assert_close(sums.double(), in_order.sum(1))
    found = in_order[:, :inputs] * scales.double()[:, None]
    assert found[4].isnan().all()
    most = x.double().abs().amax(1, keepdim=True)
    most[4] = 0
    right = torch.where(most > 0, x.double(), 0.0)
    found[4] = 0
    relative, absolute = (0.0, 0.5 / 127) if dtype == torch.int8 else (2**-4, 2**-10 / 448)
    assert ((found - right).abs() <= right.abs() * relative + most * (absolute + 1e-6)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_block", "group4", "mxfp4"])
def test_a_graph_captured_under_one_routing_is_right_under_the_opposite(name: str) -> None:
    rows, places = 700, 6
    up, down = spec_of(name, 128 * (name == "group4"), (384, 384), 512), spec_of(name, 0, (264,), 384)
    down = down if name != "group4" else spec_of(name, 128, (264,), 384)
    weights = [torch.stack([random_weight(spec, i) for i in range(places)]).cuda() for spec in (up, down)]
    x = torch.randn(rows, 512, device="cuda").bfloat16()
    mlp, out = torch.zeros(rows, 2, 384, device="cuda").bfloat16(), torch.zeros(rows, 264, device="cuda")
    routings = [routing_of(kind, rows, 2, places, "cuda") for kind in ("last", "spread", "none")]
    given = Routing(*(each.clone() for each in routings[0]))

    def run() -> None:
        expert_gated_linear(x, weights[0], None, up, "silu", given, mlp)
        expert_sum(mlp, weights[1], None, down, given, False, out)

    def of_routing(routing: Routing[Tensor], launch: Callable[[], None]) -> Tensor:
        for into, values in zip(given, routing, strict=True):
            into.copy_(values)
        launch()
        return out.clone()

    expected = [of_routing(routing, run) for routing in routings]
    of_routing(routings[0], run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for routing, right in zip(routings[::-1], expected[::-1], strict=True):
        assert torch.equal(of_routing(routing, graph.replay), right)
    assert not expected[2].any()
