"""Ops of low-rank adapters, of every backend and instruction set of processors that this machine can run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.fused_ops import AdapterMatrices, BaseProduct
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.packer import Packer, Target
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


INPUTS = 128


def matrices(features: int, kind: str) -> tuple[PackedSpec, Tensor, Tensor]:
    """First matrices of all adapters, [places, features, inputs], how they are packed, and packed."""
    spec = PackedSpec(kind, kind, (features,), INPUTS)
    generator = torch.Generator().manual_seed(features)
    plain = torch.randn(PLACES, features, INPUTS, generator=generator).to({"bf16": torch.bfloat16}.get(kind))
    packed = torch.empty(PLACES, *spec.shape, dtype=torch.uint8)
    for values, panels in zip(plain, packed, strict=True):
        Packer().floats(values, Target(spec, 0, 0, panels))
    return spec, plain, packed


@dataclass(frozen=True)
class Layer:
    """A linear layer and its adapters."""

    base: BaseProduct[Tensor]
    adapters: AdapterMatrices[Tensor]
    plain: Tensor
    """The first matrices."""

    @property
    def weights(self) -> AdapterWeights[Tensor]:
        return AdapterWeights(*self.adapters[2:])

    def run(self, backend: str, x: Tensor, adapters: Tensor, out: Tensor) -> Tensor:
        room = torch.full((len(x), self.base.spec.features), torch.nan)
        op_set(backend, 2).adapted_linear(x, self.adapters, routed(backend, adapters), self.base, room, out)
        return out

    def expected(self, backend: str, x: Tensor, adapters: Tensor, out: Tensor) -> Tensor:
        """The same of the layer's own product, in float64."""
        weight, bias, spec, epilogue = self.base
        product = torch.zeros(len(x), spec.features)
        op_set(backend, 2).packed_linear(x, weight, bias, spec, 0, product)
        own = self.plain[adapters.clamp(min=0).long()].double()
        low = torch.einsum("rfk,rk->rf", own, x.to(self.plain.dtype).double())
        found = added(low, self.weights, adapters, product if epilogue != "add" else product + out)
        first = spec.parts[0]
        return found if epilogue in ("store", "add") else gated(found[:, :first], epilogue, found[:, first:])


def layer_of(case: Case) -> Layer:
    group = 64 if case.format == "group4" else 0
    spec = PackedSpec(case.format, case.activation, case.parts, INPUTS, group=group, interleaved=case.interleaved)
    dtype = torch.float32 if case.format == "f32" else torch.bfloat16
    own, plain, packed = matrices(len(case.parts) * case.rank, "f32" if dtype is torch.float32 else "bf16")
    bias = torch.randn(spec.features, generator=torch.Generator().manual_seed(case.rank))
    base = BaseProduct(random_weight(spec), bias, spec, case.epilogue)
    return Layer(base, AdapterMatrices(packed, own, *weights_of(case.parts, case.rank, dtype)), plain)


class Case(NamedTuple):
    format: str
    activation: str
    parts: tuple[int, ...]
    rank: int
    interleaved: bool
    epilogue: str

    @property
    def width(self) -> int:
        """Columns of the output."""
        return sum(self.parts) if self.epilogue in ("store", "add") else self.parts[0]


LAYERS = [
    Case("bf16", "bf16", (70, 16, 129), 16, False, "store"),
    Case("f32", "f32", (40,), 8, False, "add"),
    Case("channel8", "a8", (72, 72), 17, True, "silu"),
    Case("group4", "a8", (33, 33), 16, True, "clamped_swiglu"),
    Case("bf16", "bf16", (48, 48), 40, False, "gelu_tanh"),
    Case("bf16", "bf16", (0, 48), 1, False, "store"),
]


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("rows", [1, 3, 150])
@pytest.mark.parametrize("backend", VARIANTS)
def test_what_adapters_add_goes_through_the_products_epilogue(backend: str, rows: int, case: Case) -> None:
    layer, adapters = layer_of(case), of_rows(rows, rows)
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows)) / INPUTS**0.5
    before = torch.ones(rows, case.width)
    out = layer.run(backend, x, adapters, before.clone())
    torch.testing.assert_close(out.double(), layer.expected(backend, x, adapters, before), rtol=1e-4, atol=1e-4)
    plain = layer.run(backend, x, torch.full_like(adapters, -1), before.clone())
    assert torch.equal(out[adapters < 0], plain[adapters < 0])


@pytest.mark.parametrize("case", LAYERS[:4])
@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_a_layers_row_has_the_same_bits_alone_and_among_others(backend: str, case: Case) -> None:
    layer, adapters, x = layer_of(case), of_rows(60, 2), torch.randn(60, INPUTS)
    together = layer.run(backend, x, adapters, torch.ones(60, case.width))
    in_order = adapters.argsort()  # those of one adapter lie together
    assert torch.equal(
        together[in_order], layer.run(backend, x[in_order], adapters[in_order], torch.ones(60, case.width))
    )
    for row in range(0, 60, 7):
        own = slice(row, row + 1)
        alone = layer.run(backend, x[own], adapters[own].clone(), torch.ones(1, case.width))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_matrices_that_are_not_the_layers_are_refused(backend: str) -> None:
    layer, adapters, x = layer_of(LAYERS[0]), of_rows(3), torch.zeros(3, INPUTS)
    given, out = layer.adapters, torch.zeros(3, 215)
    moved = given.ends.clone()
    moved[0] -= 1
    for bad, words in (
        (given._replace(a=given.a[:, :1].contiguous()), "a"),
        (given._replace(spec=replace(given.spec, inputs=INPUTS - 2)), "x"),
        (given._replace(ends=moved), "ends"),
    ):
        with pytest.raises(ValueError, match=f"adapted_linear: {words}"):
            replace(layer, adapters=bad).run(backend, x, adapters, out)


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
