"""Mixtures of experts of every backend and instruction set that this machine can run: the choice of experts against
float64, products against the sums of each token's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.ops import ACTIVATIONS, OpSet, Routing
from allspan.kernels.packed_spec import FORMATS, PackedSpec
from allspan.kernels.reference.elementwise import gated
from allspan.kernels.reference.experts import choose
from allspan.kernels.reference.packed_linear import product
from allspan.kernels.router_spec import RouterSpec
from allspan.kernels.table import op_set
from support.packed_cases import activations_of, random_weight
from support.variants import CPU_VARIANTS, VARIANTS

SPECS = {
    "softmax": RouterSpec(4),
    "normalised": RouterSpec(8, normalises=True),
    "one": RouterSpec(1, normalises=True, epsilon=1e-20),
    "sigmoid": RouterSpec(4, "sigmoid", normalises=True, epsilon=1e-20, scale=2.5),
    "groups by two": RouterSpec(6, "sigmoid", 4, 2, normalises=True, scale=1.8),
    "groups by one": RouterSpec(3, "softmax", 4, 2, "max", scale=16.0),
    "chosen": RouterSpec(4, "softmax_of_chosen"),
    "all": RouterSpec(40),
}
EXPERTS = 40


def empty_routing(rows: int, top_k: int, places: int) -> Routing[Tensor]:
    """Filled with what no op may leave there."""
    integers = [torch.full((rows, top_k), -9, dtype=torch.int32) for _ in range(2)]
    starts = torch.full((1, places + 1), -9, dtype=torch.int32)
    return Routing(integers[0], torch.full((rows, top_k), -9.0), integers[1], starts)


def everywhere(experts: int) -> Tensor:
    return torch.arange(experts, dtype=torch.int32)[None]


def routed(backend: str, logits: Tensor, spec: RouterSpec, bias: Tensor | None, places: Tensor) -> Routing[Tensor]:
    routing = empty_routing(len(logits), spec.top_k, int(places.max()) + 1)
    op_set(backend, 2).route(logits, bias, places, spec, routing, None)
    return routing


def assert_sorted(routing: Routing[Tensor]) -> None:
    """Slots are in the order of their places, then of tokens; each row's places ascend, those of other ranks last."""
    starts, flat = routing.starts[0].tolist(), routing.places.flatten()
    own = torch.nonzero(flat >= 0).flatten()
    assert starts[-1] == len(own)
    expected = own[flat[own].sort(stable=True).indices]
    assert torch.equal(routing.slots.flatten()[: len(own)].long(), expected)
    for place in range(len(starts) - 1):
        assert set(flat[expected[starts[place] : starts[place + 1]]].tolist()) <= {place}
    for row in routing.places.tolist():
        assert row == sorted(row, key=lambda place: (place < 0, place))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [1, 33, 129])
@pytest.mark.parametrize("backend", VARIANTS)
def test_choices_and_weights_are_those_of_float64(backend: str, rows: int, name: str) -> None:
    spec, generator = SPECS[name], torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, EXPERTS, generator=generator) * 3
    bias = torch.randn(EXPERTS, generator=generator) if spec.score == "sigmoid" else None
    chosen, weights = choose(logits.double(), None if bias is None else bias.double(), spec)
    routing = routed(backend, logits, spec, bias, everywhere(EXPERTS))
    ascending = chosen.sort(1)
    assert torch.equal(routing.places.long(), ascending.values)
    torch.testing.assert_close(routing.weights.double(), weights.gather(1, ascending.indices), rtol=2e-6, atol=1e-7)
    assert_sorted(routing)


@pytest.mark.parametrize("backend", VARIANTS)
def test_between_equal_choices_the_lower_expert_wins(backend: str) -> None:
    logits = torch.zeros(3, EXPERTS)
    logits[1, 7:] = 1.0
    logits[2, :20] = -0.0
    routing = routed(backend, logits, RouterSpec(3), None, everywhere(EXPERTS))
    assert routing.places.tolist() == [[0, 1, 2], [7, 8, 9], [0, 1, 2]]


@pytest.mark.parametrize("backend", VARIANTS)
def test_a_large_bias_chooses_and_leaves_the_weights_exact(backend: str) -> None:
    logits, bias = torch.full((1, EXPERTS), -18.0), torch.zeros(EXPERTS)
    bias[[3, 30]] = 12.0
    logits[0, 3], logits[0, 30] = -18.5, -17.5
    routing = routed(backend, logits, RouterSpec(2, "sigmoid"), bias, everywhere(EXPERTS))
    assert routing.places.tolist() == [[3, 30]]
    torch.testing.assert_close(
        routing.weights[0].double(), torch.tensor([-18.5, -17.5]).double().sigmoid(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("backend", VARIANTS)
def test_groups_that_are_not_kept_do_not_win_by_negative_biases(backend: str) -> None:
    logits, bias = torch.zeros(1, EXPERTS), torch.full((EXPERTS,), -12.0)
    bias[10:20] = -11.0
    spec = RouterSpec(4, "sigmoid", 4, 1)
    assert routed(backend, logits, spec, bias, everywhere(EXPERTS)).places.tolist() == [[10, 11, 12, 13]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("backend", VARIANTS)
def test_a_row_with_a_nan_says_so_and_leaves_the_others_alone(backend: str, score: str) -> None:
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(1))
    spec = RouterSpec(4, score, normalises=True)
    clean = routed(backend, logits, spec, None, everywhere(EXPERTS))
    logits[1, 39] = torch.nan
    routing = routed(backend, logits, spec, None, everywhere(EXPERTS))
    assert routing.places[1].tolist() == [0, 1, 2, 3]
    assert routing.weights[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(routing.places[row], clean.places[row])
        assert torch.equal(routing.weights[row], clean.weights[row])


@pytest.mark.parametrize("backend", VARIANTS)
def test_ranks_share_out_what_one_would_do(backend: str) -> None:
    logits = torch.randn(20, EXPERTS, generator=torch.Generator().manual_seed(2))
    whole = routed(backend, logits, SPECS["normalised"], None, everywhere(EXPERTS))
    found: list[dict[int, float]] = [{} for _ in range(20)]
    for first, count in ((0, 14), (14, 13), (27, 13)):
        places = torch.full((1, EXPERTS), -1, dtype=torch.int32)
        places[0, first : first + count] = torch.arange(count, dtype=torch.int32)
        routing = routed(backend, logits, SPECS["normalised"], None, places)
        assert_sorted(routing)
        for row, own, weights in zip(found, routing.places.tolist(), routing.weights.tolist(), strict=True):
            row.update({place + first: weight for place, weight in zip(own, weights, strict=True) if place >= 0})
    expected = zip(whole.places.tolist(), whole.weights.tolist(), strict=True)
    assert found == [dict(zip(*row, strict=True)) for row in expected]


@pytest.mark.parametrize("backend", VARIANTS)
def test_a_token_takes_one_copy_of_its_experts_the_same_on_every_rank(backend: str) -> None:
    logits = torch.randn(30, EXPERTS, generator=torch.Generator().manual_seed(3))
    one, other = torch.full((2, 2, EXPERTS), -1, dtype=torch.int32)
    one[:, :20], other[:, 20:] = torch.arange(20, dtype=torch.int32), torch.arange(20, dtype=torch.int32)
    one[1, 39], other[1, 39] = 20, -1  # the second copy of expert 39 lies with the first rank
    own = [routed(backend, logits, RouterSpec(4), None, places).places for places in (one, other)]
    assert torch.equal((own[0] >= 0).sum(1) + (own[1] >= 0).sum(1), torch.full((30,), 4))
    assert (own[0] == 20).any()
    assert (own[1] == 19).any()


@pytest.mark.parametrize("backend", VARIANTS)
def test_the_tokens_of_every_expert_are_counted_on_whichever_rank_it_lies(backend: str) -> None:
    logits = torch.randn(70, EXPERTS, generator=torch.Generator().manual_seed(6))
    chosen = choose(logits, None, RouterSpec(3))[0]
    places, load = everywhere(EXPERTS), torch.full((EXPERTS,), 2**40)
    places[0, 20:] = -1
    op_set(backend, 2).route(logits, None, places, RouterSpec(3), empty_routing(70, 3, 20), load)
    assert torch.equal(load - 2**40, torch.bincount(chosen.flatten(), minlength=EXPERTS))


@pytest.mark.parametrize("backend", VARIANTS)
def test_padding_chooses_no_expert_and_is_not_counted(backend: str) -> None:
    logits, rows = torch.randn(9, EXPERTS), torch.arange(9, dtype=torch.int32)
    logits[4], rows[4:6] = torch.nan, -1
    routing, load = empty_routing(9, 3, EXPERTS), torch.zeros(EXPERTS, dtype=torch.int64)
    op_set(backend, 2).route(logits, None, everywhere(EXPERTS), RouterSpec(3), routing, load, rows)
    assert int(load.sum()) == int(routing.starts[0, -1]) == 7 * 3
    assert (routing.places[4:6] == -1).all()
    assert (routing.places[[3, 6]] >= 0).all()
    assert (routing.weights[4:6] == 0).all()
    assert_sorted(routing)


def experts_of(spec: PackedSpec, count: int) -> Tensor:
    """uint8 [count, *spec.shape]: one random weight, whose panels each expert has in another order."""
    weight = random_weight(spec)
    step = 2 if spec.interleaved else 1
    return torch.stack([weight.roll(step * place, 0) for place in range(count)])


def some_routing(kind: str, rows: int, top_k: int, places: int) -> Routing[Tensor]:
    """ "spread" over all places with some of other ranks, all to the "last" ones, or "none" here."""
    generator = torch.Generator().manual_seed(rows)
    logits, where = torch.randn(rows, places + 2, generator=generator), everywhere(places + 2)
    if kind == "last":
        logits[:, places - top_k : places] += 100
    if kind == "none":
        where = torch.full_like(where, -1)
    where[where >= places] = -1
    routing = empty_routing(rows, top_k, places)
    op_set("reference").route(logits, None, where, RouterSpec(top_k, normalises=True), routing, None)
    return routing


FORMAT_CASES = [
    pytest.param(
        name, activation, marks=[] if name in ("f32", "bf16", "q4_0", "q8_0", "channel8") else pytest.mark.nightly
    )
    for name in FORMATS
    for activation in activations_of(name)
]


def spec_of(name: str, activation: str, parts: tuple[int, ...], inputs: int) -> PackedSpec:
    group = 64 if name.startswith("group") else 0
    return PackedSpec(name, activation, parts, inputs, group=group, interleaved=len(parts) == 2)


ROUTINGS = [("spread", 1), ("spread", 2), ("spread", 33), ("spread", 129), ("last", 1), ("last", 127), ("none", 5)]


@functools.lru_cache(maxsize=1)  # backends follow each other
def product_cases(name: str, activation: str) -> list[tuple[str, list[Any], Tensor]]:
    """Ops, their arguments up to `out`, and what `out`, before filled with 7s, is afterwards."""
    inputs, width, top_k, places = 256, 40, 2, 5
    up, down = spec_of(name, activation, (width, width), inputs), spec_of(name, activation, (72,), inputs)
    weights, generator = [experts_of(spec, places) for spec in (up, down)], torch.Generator().manual_seed(8)
    biases = [torch.randn(places, features, generator=generator) for features in (2 * width, 72)]
    made: list[tuple[str, list[Any], Tensor]] = []
    for kind, rows in ROUTINGS:
        routing, x = some_routing(kind, rows, top_k, places), torch.randn(rows, inputs, generator=generator)
        mlp = torch.randn(rows, top_k, inputs, generator=generator)
        own = (rows, top_k, width)
        for active in ACTIVATIONS if rows < 3 else ("clamped_swiglu",):
            made.append(("expert_gated_linear", [x, weights[0], biases[0], up, active, routing], torch.full(own, 7.0)))
        made += [
            ("expert_sum", [mlp, weights[1], biases[1], down, routing, adds], torch.full((rows, 72), 7.0))
            for adds in (False, True)
        ]
    for op, arguments, out in made:
        op_set("reference").op(op)(*arguments, out)
    return made


@pytest.mark.parametrize("backend", CPU_VARIANTS)
@pytest.mark.parametrize(("name", "activation"), FORMAT_CASES)
def test_products_are_those_of_each_token_and_expert(backend: str, name: str, activation: str) -> None:
    for op, arguments, expected in product_cases(name, activation):
        out = torch.full(expected.shape, 7.0)
        op_set(backend, 2).op(op)(*arguments, out)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-4)


def test_the_reference_computes_each_slot_by_itself() -> None:
    rows, inputs, width, top_k, places = 9, 64, 24, 3, 6
    routing, x = some_routing("spread", rows, top_k, places), torch.randn(rows, inputs)
    spec = spec_of("f32", "f32", (width, width), inputs)
    weight, ops = experts_of(spec, places), op_set("reference")
    out = torch.zeros(rows, top_k, width)
    ops.expert_gated_linear(x, weight, None, spec, "silu", routing, out)
    down = spec_of("f32", "f32", (inputs,), width)
    weights, total = experts_of(down, places), torch.ones(rows, inputs)
    ops.expert_sum(out, weights, None, down, routing, True, total)
    for row in range(rows):
        expected = torch.ones(inputs)
        for place, factor in zip(routing.places[row].tolist(), routing.weights[row], strict=True):
            if place >= 0:
                gate, up = product(x[row : row + 1], weight[place], None, spec).chunk(2, 1)
                expected += factor * product(gated(gate, "silu", up), weights[place], None, down)[0]
        torch.testing.assert_close(total[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "activation"), FORMAT_CASES)
@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_a_token_gets_the_same_bits_alone_as_among_others(backend: str, name: str, activation: str) -> None:
    rows, inputs, width, top_k, places = 40, 256, 48, 3, 6
    generator = torch.Generator().manual_seed(4)
    logits, x = torch.randn(rows, places, generator=generator), torch.randn(rows, inputs, generator=generator)
    up, down = spec_of(name, activation, (width, width), inputs), spec_of(name, activation, (64,), inputs)
    weights, ops = (experts_of(up, places), experts_of(down, places)), op_set(backend, 2)

    def run(own: slice) -> tuple[Tensor, Tensor]:
        tokens = x[own].contiguous()
        routing = empty_routing(len(tokens), top_k, places)
        ops.route(logits[own].contiguous(), None, everywhere(places), RouterSpec(top_k), routing, None)
        gated_rows, total = torch.zeros(len(tokens), top_k, width), torch.zeros(len(tokens), 64)
        ops.expert_gated_linear(tokens, weights[0], None, up, "silu", routing, gated_rows)
        seen = tokens[:, None].repeat(1, top_k, 1).contiguous()
        ops.expert_sum(seen, weights[1], None, down, routing, False, total)
        return gated_rows, total

    whole = run(slice(0, rows))
    for own in (slice(0, 1), slice(3, 5), slice(7, 24), slice(39, 40)):
        for part, all_rows in zip(run(own), whole, strict=True):
            assert torch.equal(part, all_rows[own])


@pytest.mark.parametrize("name", ["bf16", "q8_0"])
@pytest.mark.parametrize("backend", CPU_VARIANTS)
def test_any_number_of_tokens_gives_each_the_same_bits(backend: str, name: str) -> None:
    """Of one and two tokens threads read longer stretches of an expert than of more."""
    most, inputs, features, width, top_k, places = 129, 64, 1100, 40, 3, 6
    activation = name if name == "bf16" else "a8"
    down, up = (spec_of(name, activation, parts, inputs) for parts in ((features,), (width, width)))
    generator, ops = torch.Generator().manual_seed(6), op_set(backend, 2)
    weights = experts_of(down, places), experts_of(up, places)
    bias = torch.randn(places, features, generator=generator)
    logits, mlp = torch.randn(most, places, generator=generator), torch.randn(most, top_k, inputs, generator=generator)

    def run(count: int, kernels: OpSet = ops) -> tuple[Tensor, Tensor]:
        routing, x = empty_routing(count, top_k, places), mlp[:count].contiguous()
        total, gated_rows = torch.zeros(count, features), torch.zeros(count, top_k, width)
        ops.route(logits[:count].contiguous(), None, everywhere(places), RouterSpec(top_k), routing, None)
        kernels.expert_sum(x, weights[0], bias, down, routing, False, total)
        kernels.expert_gated_linear(x[:, 0].contiguous(), weights[1], None, up, "silu", routing, gated_rows)
        return total, gated_rows

    whole = run(most)
    for count in (*range(1, 34), 127, 128):
        for part, of_all in zip(run(count), whole, strict=True):
            assert torch.equal(part, of_all[:count]), f"{count} tokens"
    for part, expected in zip(run(2), run(2, op_set("reference")), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("backend", VARIANTS)
def test_other_expert_ops_agree_with_their_definitions(backend: str) -> None:
    ops, generator = op_set(backend, 2), torch.Generator().manual_seed(5)
    routing = some_routing("spread", 7, 2, 5)
    gate_up, out = torch.randn(7, 2, 2 * 24, generator=generator), torch.full((7, 2, 24), 7.0)
    gate, up = gate_up.chunk(2, 2)
    for activation in ACTIVATIONS:
        ops.expert_gated_mul(gate_up, activation, routing, out)
        expected = torch.where((routing.places >= 0)[..., None], gated(gate, activation, up), 7.0)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    x, logits = torch.randn(7, 30, generator=generator), torch.randn(7, 1, generator=generator)
    right = (x.double() * logits.double().sigmoid()).float()
    ops.scale_rows(x, logits)
    torch.testing.assert_close(x, right, rtol=1e-6, atol=1e-6)
    spec = PackedSpec("f32", "f32", (40,), 96)
    weight, rows = experts_of(spec, 5), torch.randn(7, 96, generator=generator)
    products, expected = torch.full((7, 2, 50), 7.0), torch.full((7, 2, 50), 7.0)
    ops.expert_linear(rows, weight, None, spec, 6, routing, products)
    op_set("reference").expert_linear(rows, weight, None, spec, 6, routing, expected)
    torch.testing.assert_close(products, expected, rtol=1e-5, atol=1e-5)
    columns = torch.stack([torch.randperm(96, generator=generator) for _ in range(5)]).int()
    slots_rows = rows[:, None].expand(7, 2, 96).contiguous()
    for x in (rows, slots_rows):
        gathered = torch.full((7, 2, 96), 7.0)
        ops.expert_gather(x, columns, routing, gathered)
        for row, own in enumerate(routing.places.tolist()):
            for j, place in enumerate(own):
                right = torch.full((96,), 7.0) if place < 0 else rows[row, columns[place].long()]
                assert torch.equal(gathered[row, j], right)
    again = torch.full((7, 2, 50), 7.0)
    ops.expert_linear(slots_rows, weight, None, spec, 6, routing, again)
    assert torch.equal(again, products)


@pytest.mark.parametrize("backend", VARIANTS)
def test_a_clamped_nan_stays_one(backend: str) -> None:
    gate_up, out = torch.tensor([[torch.nan, 1.0, 9.0, 9.0, torch.nan, 9.0]]), torch.zeros(1, 3)
    op_set(backend, 2).gated_mul(gate_up, "clamped_swiglu", out)
    assert out.isnan().tolist() == [[True, True, False]]
    torch.testing.assert_close(out[0, 2].item(), 56.0, rtol=1e-4, atol=0)


def _refused(change: dict[int, Any]) -> None:
    routing = empty_routing(4, 2, 5)
    arguments: list[Any] = [torch.zeros(4, 5), None, everywhere(5), RouterSpec(2), routing, None]
    for place, value in change.items():
        arguments[place] = value
    op_set("cpu").route(*arguments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({3: RouterSpec(6)}, "top_k must be from 1"),
        ({3: RouterSpec(2, groups=2)}, "groups"),
        ({3: RouterSpec(2, "cosine")}, "score is not known"),
        ({2: torch.full((1, 5), 5, dtype=torch.int32)}, "places leaves"),
        ({0: torch.zeros(3, 5)}, "places"),
        ({5: torch.zeros(4, dtype=torch.int64)}, "load"),
    ],
)
def test_arguments_that_would_lead_outside_are_refused(change: dict[int, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _refused(change)
