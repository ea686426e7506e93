"""Ops of low-rank adapters, of every backend and instruction set that this machine can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.adapter_layout import COLUMNS, panels_of, put_rows, rows_of
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.ops import Routing
from allspan.kernels.table import op_set
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


def weights_of(parts: tuple[int, ...], rank: int, dtype: torch.dtype) -> AdapterWeights[Tensor]:
    """Adapters of lower ranks, too, behind which there is what must not be read."""
    generator = torch.Generator().manual_seed(rank)
    panels = torch.zeros(PLACES, panels_of(parts), rank, COLUMNS, dtype=dtype)
    ranks = torch.randint(0, rank + 1, (PLACES, len(parts)), generator=generator, dtype=torch.int32)
    for place in range(PLACES):
        for part, outputs in enumerate(parts):
            own = int(ranks[place, part])
            put_rows(torch.randn(outputs, own, generator=generator).to(dtype), parts, part, panels[place])
            first = panels_of(parts[:part])
            panels[place, first : first + panels_of([outputs]), own:] = torch.nan
    return AdapterWeights(panels, ranks, torch.tensor(parts, dtype=torch.int32).cumsum(0).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("parts", "rank"), [((40,), 8), ((70, 16, 129), 16), ((33, 33), 17), ((0, 48), 1)])
@pytest.mark.parametrize("rows", [1, 2, 33, 300])
@pytest.mark.parametrize("backend", VARIANTS)
def test_products_of_parts_are_added_in_rows_with_adapters_alone(
    backend: str, rows: int, parts: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    adapters, weights = of_rows(rows, rows), weights_of(parts, rank, dtype)
    x = torch.randn(rows, len(parts) * rank, generator=generator)
    before = torch.randn(rows, sum(parts), generator=generator)
    out = before.clone()
    op_set(backend, 2).add_adapters(x, weights, routed(backend, adapters), out)
    for row, place in enumerate(adapters.tolist()):
        if place < 0:
            assert torch.equal(out[row], before[row])
            continue
        sums = []
        for part in range(len(parts)):
            own = int(weights.ranks[place, part])
            matrix = rows_of(weights.panels[place], parts, part)[:, :own].double()
            sums.append(x[row, part * rank : part * rank + own].double() @ matrix.T)
        torch.testing.assert_close(out[row].double(), before[row].double() + torch.cat(sums), rtol=1e-5, atol=1e-5)


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
