"""Ops of low-rank adapters, of every backend and instruction set that this machine can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.packed_linear import pack, unpack
from allspan.kernels.table import op_set
from support.packed_cases import random_fields
from support.variants import CPU_VARIANTS, VARIANTS

PLACES = 4


def empty_routing(rows: int) -> Routing[Tensor]:
    """Filled with what no op may leave there."""
    integers = [torch.full((rows, 1), -9, dtype=torch.int32) for _ in range(2)]
    starts = torch.full((1, PLACES + 1), -9, dtype=torch.int32)
    return Routing(integers[0], torch.full((rows, 1), -9.0), integers[1], starts)


def routed(backend: str, adapters: Tensor, rows: Tensor | None = None) -> Routing[Tensor]:
    routing = empty_routing(len(adapters if rows is None else rows))
    op_set(backend, 2).route_adapters(adapters, rows, routing)
    return routing


def of_rows(count: int, seed: int = 0) -> Tensor:
    """A slot for each row, or none."""
    return torch.randint(-1, PLACES, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.parametrize("backend", VARIANTS)
def test_rows_are_sorted_by_their_adapters_and_those_without_left_out(backend: str) -> None:
    routing = routed(backend, torch.tensor([2, -1, 0, 7, 2, -5, 0], dtype=torch.int32))
    assert routing.places.flatten().tolist() == [2, -1, 0, -1, 2, -1, 0]
    assert routing.starts[0].tolist() == [0, 2, 2, 4, 4]
    assert routing.slots.flatten()[:4].tolist() == [2, 6, 0, 4]
    assert set(routing.weights.flatten().tolist()) == {1.0}


@pytest.mark.parametrize("backend", VARIANTS)
def test_rows_of_logits_have_the_adapters_of_their_tokens(backend: str) -> None:
    adapters, rows = torch.tensor([3, -1, 1, 1], dtype=torch.int32), torch.tensor([3, 0, 1], dtype=torch.int32)
    routing = routed(backend, adapters, rows)
    assert routing.places.flatten().tolist() == [1, 3, -1]
    assert routing.starts[0].tolist() == [0, 0, 1, 1, 2]


def weights_of(spec: PackedSpec) -> Tensor:
    """uint8 [places, *spec.shape]."""
    return torch.stack([pack(spec, random_fields(spec, seed)) for seed in range(PLACES)])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("parts", "rank"), [((40,), 8), ((70, 16, 17), 16), ((33, 33), 17), ((0, 48), 1)])
@pytest.mark.parametrize("rows", [1, 2, 33, 300])
@pytest.mark.parametrize("backend", VARIANTS)
def test_products_of_parts_are_added_in_rows_with_adapters_alone(
    backend: str, rows: int, parts: tuple[int, ...], rank: int, kind: str
) -> None:
    spec, generator = PackedSpec(kind, kind, parts, rank), torch.Generator().manual_seed(rows)
    adapters, weight = of_rows(rows, rows), weights_of(spec)
    x = torch.randn(rows, len(parts) * rank, generator=generator)
    before = torch.randn(rows, sum(parts), generator=generator)
    out = before.clone()
    op_set(backend, 2).add_adapters(x, weight, spec, routed(backend, adapters), out)
    near = 1e-5 if kind == "f32" else 1e-2  # products of bfloat16 round x
    for row, place in enumerate(adapters.tolist()):
        if place < 0:
            assert torch.equal(out[row], before[row])
            continue
        matrices = torch.split(unpack(weight[place], spec).double(), list(parts))
        sums = [x[row, p * rank : (p + 1) * rank].double() @ matrix.T for p, matrix in enumerate(matrices)]
        torch.testing.assert_close(out[row].double(), before[row].double() + torch.cat(sums), rtol=near, atol=near)


@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_a_row_has_the_same_bits_alone_and_among_others(backend: str) -> None:
    spec = PackedSpec("bf16", "bf16", (70, 20), 16)
    adapters, weight, x = of_rows(40, 1), weights_of(spec), torch.randn(40, 32)
    together, ops = torch.ones(40, 90), op_set(backend, 2)
    ops.add_adapters(x, weight, spec, routed(backend, adapters), together)
    for row in range(40):
        alone = torch.ones(1, 90)
        own = x[row : row + 1].contiguous()
        ops.add_adapters(own, weight, spec, routed(backend, adapters[row : row + 1].contiguous()), alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_arguments_that_do_not_fit_are_refused(backend: str) -> None:
    spec, ops = PackedSpec("f32", "f32", (16,), 8), op_set(backend, 2)
    weight, routing = weights_of(spec), routed(backend, of_rows(3))
    with pytest.raises(ValueError, match="add_adapters: out"):
        ops.add_adapters(torch.zeros(3, 8), weight, spec, routing, torch.zeros(3, 15))
    with pytest.raises(ValueError, match="add_adapters: x"):
        ops.add_adapters(torch.zeros(3, 9), weight, spec, routing, torch.zeros(3, 16))
    with pytest.raises(ValueError, match="add_adapters: starts"):
        ops.add_adapters(torch.zeros(3, 8), weight[:2], spec, routing, torch.zeros(3, 16))
