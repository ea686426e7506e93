"""Ops of low-rank adapters, of every backend and instruction set of processors that this machine can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.ops import Routing
from allspan.kernels.table import op_set
from support.adapter_cases import PARTS, ROUTED, ROWS, added, empty_routing, low_of, of_rows, weights_of
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
