"""Low-rank adapters by the CUDA kernels: the case tables of every backend, and products of whole layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters.adapted_linear import adapted_linear
from allspan.kernels.cuda.adapters.embed import embed_adapters
from allspan.kernels.cuda.adapters.expand import add_adapters
from allspan.kernels.cuda.adapters.route import route_adapters
from allspan.kernels.cuda.adapters.shrink import shrink
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.linear.packed_linear import packed_gated_linear, packed_linear, packed_linear_add
from allspan.kernels.fused_ops import AdapterMatrices, BaseProduct
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference import adapters as reference
from support.adapter_cases import (
    EMBEDDED,
    PARTS,
    PLACES,
    ROUTED,
    ROWS,
    added,
    embedded,
    empty_routing,
    low_of,
    of_rows,
    weights_of,
)
from support.cuda_rows import is_kept, poisoned
from support.packed_cases import random_weight

BF16, F16 = torch.bfloat16, torch.float16


def routed(adapters: Tensor, device: str, rows: Tensor | None = None, places: int = PLACES) -> Routing[Tensor]:
    routing = empty_routing(len(adapters if rows is None else rows), device, places)
    route_adapters(adapters.to(device), None if rows is None else rows.to(device), routing)
    return routing


def on_device(weights: AdapterWeights[Tensor], device: str) -> AdapterWeights[Tensor]:
    return AdapterWeights(*(each.to(device) for each in weights))


@pytest.mark.parametrize(("adapters", "rows", "places", "starts", "slots"), ROUTED)
def test_rows_are_sorted_by_their_tokens_adapters(
    device: str,
    adapters: list[int],
    rows: list[int] | None,
    places: list[int],
    starts: list[int],
    slots: list[int],
) -> None:
    tokens = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    routing = routed(torch.tensor(adapters, dtype=torch.int32), device, tokens)
    assert routing.places.flatten().tolist() == places
    assert routing.starts[0].tolist() == starts
    assert routing.slots.flatten()[: len(slots)].tolist() == slots
    assert set(routing.weights.flatten().tolist()) == {1.0}


@pytest.mark.parametrize("places", [1, 33, 300])
def test_many_rows_are_sorted_in_their_order_and_those_without_come_last(places: int, device: str) -> None:
    for count in (1, 31, 33, 1500):
        adapters = of_rows(count, count, places)
        rows = torch.randint(-1, count, (count + 5,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        found = routed(adapters, device, rows, places)
        keys = torch.where(rows < 0, -1, adapters[rows.clamp(min=0).long()])
        keys = torch.where(keys < 0, places, keys)
        assert torch.equal(found.slots.flatten().cpu().long(), keys.sort(stable=True).indices)
        starts = torch.searchsorted(keys.sort().values, torch.arange(places + 1, dtype=torch.int32))
        assert torch.equal(found.starts[0].cpu().long(), starts)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
@pytest.mark.parametrize(("ids", "adapters", "first"), EMBEDDED)
def test_a_token_has_its_adapters_row_and_zeros_without_one(
    ids: list[int], adapters: list[int], first: int, dtype: torch.dtype, device: str
) -> None:
    weight = torch.randn(PLACES, 6, 17, generator=torch.Generator().manual_seed(3)).to(dtype)
    tokens, places = (torch.tensor(each, dtype=torch.int32, device=device) for each in (ids, adapters))
    out = poisoned(len(ids), 17, dtype=torch.float32, device=device)
    embed_adapters(tokens, places, weight.to(device), first, out)
    assert is_kept(out)
    assert torch.equal(out.cpu(), embedded(ids, adapters, weight, first))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("parts", "rank"), [*PARTS, ((64, 128), 40)])
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_parts_are_added_in_rows_with_adapters_alone(
    rows: int, parts: tuple[int, ...], rank: int, dtype: torch.dtype, device: str
) -> None:
    adapters, weights = of_rows(rows, rows), weights_of(parts, rank, dtype)
    x = low_of(rows, weights, adapters)
    for kind, near in ((torch.float32, 1e-4), (dtype, 0.02)):
        before = torch.randn(rows, sum(parts), generator=torch.Generator().manual_seed(rows + 1)).to(kind)
        out = poisoned(rows, sum(parts), dtype=kind, device=device)
        out.copy_(before)
        add_adapters(x.to(device), on_device(weights, device), routed(adapters, device), out)
        assert is_kept(out)
        assert torch.equal(out.cpu()[adapters < 0], before[adapters < 0])
        torch.testing.assert_close(out.cpu().double(), added(x, weights, adapters, before), rtol=near, atol=near)


def matrices(features: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, PackedSpec]:
    """First matrices of all adapters, packed."""
    name = "bf16" if dtype is BF16 else "f16"
    spec = PackedSpec(name, name, (features,), inputs, memory="rows")
    a = torch.zeros(PLACES, features, spec.depth, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    a[:, :, :inputs] = torch.randn(PLACES, features, inputs, generator=generator) / inputs**0.5
    return a.view(torch.uint8).view(PLACES, *spec.shape), spec


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("features", "inputs"), [(5, 70), (16, 1300), (40, 64), (96, 3000)])
def test_first_products_are_sums_of_all_parts_of_the_inputs(
    features: int, inputs: int, dtype: torch.dtype, device: str
) -> None:
    a, spec = matrices(features, inputs, dtype)
    plain = a.view(dtype).view(PLACES, features, -1)[:, :, :inputs].double()
    for rows in (1, 9, 33, 270):
        adapters = of_rows(rows, rows)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
        found = shrink(x.to(device), a.to(device), spec, routed(adapters, device)).cpu().double().sum(0)
        own = adapters >= 0
        expected = torch.einsum("rfk,rk->rf", plain[adapters[own].long()], x[own].double())
        torch.testing.assert_close(found[own], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("epilogue", ["store", "add", "silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("format_", ["bf16", "fp8", "channel8", "group4"])
def test_a_layer_with_adapters_is_the_sum_of_its_products(format_: str, epilogue: str, device: str) -> None:
    is_gated, parts, rank, inputs = epilogue not in ("store", "add"), (72, 72), 16, 128
    group = 64 if format_ == "group4" else 0
    spec = PackedSpec(format_, "bf16" if format_ == "bf16" else "a16", parts, inputs, group=group, memory="rows")
    weight = random_weight(spec, 3)
    a, a_spec = matrices(2 * rank, inputs, BF16)
    second = weights_of(parts, rank, BF16)
    second.panels.nan_to_num_(7.0)  # behind an adapter's rank lies what another one left there
    bias = torch.randn(144, generator=torch.Generator().manual_seed(5))
    for rows in (1, 7, 40, *((300,) if format_ == "bf16" else ())):
        adapters = of_rows(rows, rows + 1)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(BF16)
        kind = torch.float32 if epilogue == "add" else BF16
        before = torch.randn(rows, 72 if is_gated else 144).to(kind)
        given = AdapterMatrices(a, a_spec, *second)
        base = BaseProduct(weight, bias, spec, epilogue)
        expected = before.float().clone()
        reference.adapted_linear(x.float(), given, routed_by_reference(adapters), base, None, expected)
        out = before.to(device)
        moved = AdapterMatrices(a.to(device), a_spec, *on_device(second, device))
        own_base = BaseProduct(weight.to(device), bias.to(device), spec, epilogue)
        room = torch.zeros(rows, 144, dtype=BF16, device=device) if is_gated else None
        adapted_linear(x.to(device), moved, routed(adapters, device), own_base, room, out)
        near = 0.02 * float(expected.abs().max())
        torch.testing.assert_close(out.float().cpu(), expected, rtol=0.02, atol=near)
        alone = before.to(device)
        arguments = x.to(device), own_base.weight, own_base.bias, spec, 0
        if is_gated:
            packed_gated_linear(*arguments, epilogue, alone)
        else:
            (packed_linear_add if epilogue == "add" else packed_linear)(*arguments, alone)
        if rows <= 8 or not is_gated:
            assert torch.equal(out[adapters < 0], alone[adapters < 0])


ONE_ROW = [
    (BF16, (70, 16, 129), "store", 40, 1300),
    (BF16, (130, 130), "silu", 17, 1300),
    (F16, (200,), "add", 8, 1300),
    (F16, (0, 300), "store", 16, 1300),
    (BF16, (200,), "store", 16, 70),
]
"""Types, parts, epilogues, the rank that there is room for, and inputs: several stretches, or fewer than warps."""


@pytest.mark.parametrize(("dtype", "parts", "epilogue", "rank", "inputs"), ONE_ROW)
def test_one_row_has_its_adapter_within_the_product(
    dtype: torch.dtype, parts: tuple[int, ...], epilogue: str, rank: int, inputs: int, device: str
) -> None:
    """Of mixed ranks, or none; the last stretch of inputs is not whole."""
    is_gated, name = epilogue == "silu", "bf16" if dtype is BF16 else "f16"
    spec = PackedSpec(name, name, parts, inputs, memory="rows")
    weight, (a, a_spec) = random_weight(spec, 3), matrices(len(parts) * rank, inputs, dtype)
    second = weights_of(parts, rank, dtype)
    moved = AdapterMatrices(a.to(device), a_spec, *on_device(second, device))
    x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = torch.randn(1, parts[0] if is_gated else sum(parts)).to(torch.float32 if epilogue == "add" else dtype)
    base, alone_base = (BaseProduct(each, None, spec, epilogue) for each in (weight.to(device), weight))
    for place in (-1, *range(PLACES)):
        adapters, expected = torch.tensor([place], dtype=torch.int32), before.float().clone()
        given = AdapterMatrices(a, a_spec, *second)
        reference.adapted_linear(x.float(), given, routed_by_reference(adapters), alone_base, None, expected)
        routing = routed(adapters, device)
        out, alone = before.clone().to(device), before.clone().to(device)
        with modules.noting() as kernels:
            adapted_linear(x.to(device), moved, routing, base, None, out)
        assert [kernel.name for kernel in kernels] == ["shrink", "skinny"]
        adapted_linear(x.to(device), moved, routing, base, None, out)
        torch.testing.assert_close(out.float().cpu(), expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))
        if is_gated:
            packed_gated_linear(x.to(device), base.weight, None, spec, 0, epilogue, alone)
        else:
            add = packed_linear_add if epilogue == "add" else packed_linear
            add(x.to(device), base.weight, None, spec, 0, alone)
        assert torch.equal(out, alone) is (place < 0 or not second.ranks[place].any())


def routed_by_reference(adapters: Tensor) -> Routing[Tensor]:
    routing = empty_routing(len(adapters))
    reference.route_adapters(adapters, None, routing)
    return routing
