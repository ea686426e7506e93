"""Ops of low-rank adapters, of every backend and instruction set of processors that this machine can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.fused_ops import BaseProduct
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.elementwise import gated
from allspan.kernels.table import op_set
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
from support.packed_cases import random_weight
from support.variants import CPU_VARIANTS, VARIANTS


def routed(backend: str, adapters: Tensor, rows: Tensor | None = None) -> Routing[Tensor]:
    routing = empty_routing(len(adapters if rows is None else rows))
    op_set(backend, 2).route_adapters(adapters, rows, routing)
    return routing


@pytest.mark.parametrize(("adapters", "rows", "places", "starts", "slots"), ROUTED)
@pytest.mark.parametrize("backend", VARIANTS)
def test_rows_are_sorted_by_their_tokens_adapters_and_those_without_left_out(
    backend: str,
    adapters: list[int],
    rows: list[int] | None,
    places: list[int],
    starts: list[int],
    slots: list[int],
) -> None:
    tokens = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    routing = routed(backend, torch.tensor(adapters, dtype=torch.int32), tokens)
    assert routing.places.flatten().tolist() == places
    assert routing.starts[0].tolist() == starts
    assert routing.slots.flatten()[: len(slots)].tolist() == slots
    assert set(routing.weights.flatten().tolist()) == {1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ids", "adapters", "first"), EMBEDDED)
@pytest.mark.parametrize("count", [6, 0])
@pytest.mark.parametrize("backend", VARIANTS)
def test_a_token_has_its_adapters_row_and_zeros_without_one(
    backend: str, count: int, ids: list[int], adapters: list[int], first: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(PLACES, count, 17, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = torch.full((len(ids), 17), torch.nan)
    tokens, places = (torch.tensor(each, dtype=torch.int32) for each in (ids, adapters))
    op_set(backend, 2).embed_adapters(tokens, places, weight, first, out)
    assert torch.equal(out, embedded(ids, adapters, weight, first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("parts", "rank"), PARTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("backend", VARIANTS)
def test_products_of_parts_are_added_in_rows_with_adapters_alone(
    backend: str, rows: int, parts: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    adapters, weights = of_rows(rows, rows), weights_of(parts, rank, dtype)
    x = low_of(rows, weights, adapters)
    before = torch.randn(rows, sum(parts), generator=torch.Generator().manual_seed(rows + 1))
    out = before.clone()
    op_set(backend, 2).add_adapters(x, weights, routed(backend, adapters), out)
    assert torch.equal(out[adapters < 0], before[adapters < 0])
    torch.testing.assert_close(out.double(), added(x, weights, adapters, before), rtol=1e-5, atol=1e-5)


EXPANDED = [
    ("bf16", "bf16", (70, 16, 129), 16, False, "store"),
    ("f32", "f32", (40,), 8, False, "add"),
    ("channel8", "a8", (72, 72), 17, True, "silu"),
    ("group4", "a8", (33, 33), 16, True, "clamped_swiglu"),
    ("bf16", "bf16", (0, 48), 1, False, "store"),
]


@pytest.mark.parametrize(("name", "activation", "parts", "rank", "interleaved", "epilogue"), EXPANDED)
@pytest.mark.parametrize("rows", [1, 3, 150])
@pytest.mark.parametrize("backend", VARIANTS)
def test_what_adapters_add_goes_through_the_products_epilogue(
    backend: str,
    rows: int,
    name: str,
    activation: str,
    parts: tuple[int, ...],
    rank: int,
    interleaved: bool,
    epilogue: str,
) -> None:
    group = 64 if name == "group4" else 0
    spec = PackedSpec(name, activation, parts, 128, group=group, interleaved=interleaved)
    adapters, weights = of_rows(rows, rows), weights_of(parts, rank, torch.bfloat16)
    low, generator = low_of(rows, weights, adapters), torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, 128, generator=generator), torch.randn(sum(parts), generator=generator)
    weight, ops = random_weight(spec), op_set(backend, 2)
    product, out = torch.zeros(rows, sum(parts)), torch.ones(rows, parts[0] if interleaved else sum(parts))
    ops.packed_linear(x, weight, bias, spec, 0, product)
    expected = added(low, weights, adapters, product if epilogue != "add" else product + out)
    if interleaved:
        expected = gated(expected[:, : parts[0]], epilogue, expected[:, parts[0] :])
    plain, base = out.clone(), BaseProduct(weight, bias, spec, epilogue)
    ops.expanded_linear(x, low, weights, routed(backend, adapters), base, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    ops.expanded_linear(x, low, weights, routed(backend, torch.full_like(adapters, -1)), base, plain)
    assert torch.equal(out[adapters < 0], plain[adapters < 0])


@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_a_row_has_the_same_bits_alone_and_among_others(backend: str) -> None:
    adapters, weights, x = of_rows(40, 1), weights_of((70, 20), 16, torch.bfloat16), torch.randn(40, 32)
    together, ops = torch.ones(40, 90), op_set(backend, 2)
    ops.add_adapters(x, weights, routed(backend, adapters), together)
    for row in range(40):
        alone = torch.ones(1, 90)
        own = x[row : row + 1].contiguous()
        ops.add_adapters(own, weights, routed(backend, adapters[row : row + 1].contiguous()), alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_arguments_that_do_not_fit_are_refused(backend: str) -> None:
    ops, weights, routing = op_set(backend, 2), weights_of((16,), 8, torch.float32), routed(backend, of_rows(3))
    x, out = torch.zeros(3, 8), torch.zeros(3, 16)
    for bad_x, bad_weights, bad_out, words in (
        (x, weights, torch.zeros(3, 15), "out"),
        (torch.zeros(3, 9), weights, out, "x"),
        (x, weights._replace(panels=weights.panels[:2].contiguous(), ranks=weights.ranks[:2]), out, "starts"),
        (x, weights._replace(ranks=weights.ranks + 9), out, "ranks"),
        (x, weights._replace(ends=torch.tensor([65], dtype=torch.int32)), torch.zeros(3, 65), "panels"),
    ):
        with pytest.raises(ValueError, match=f"add_adapters: {words}"):
            ops.add_adapters(bad_x, bad_weights, routing, bad_out)
