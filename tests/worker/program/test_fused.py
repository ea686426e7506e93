"""Programs with ops that are several in one."""

from __future__ import annotations

import pytest

from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.worker.program.fused import with_expanded_products, with_fused_adapters
from allspan.worker.program.program import Program, ProgramBuilder, Rows

LOW = PackedSpec("bf16", "bf16", (16,), 8, memory="rows")
GATED = PackedSpec("bf16", "bf16", (4, 4), 8, interleaved=True)


def layer(products: int, is_added: bool = False, spec: PackedSpec = LOW) -> Program:
    """A gated layer with adapters, or one that is added, whose own weight is several."""
    program = ProgramBuilder()
    x, low, product, out = (program.buffer(name, Rows.TOKENS, 8) for name in ("x", "low", "product", "out"))
    routing, weights = Routing(*map(program.named, "abcd")), AdapterWeights(*map(program.named, "efg"))
    program.op("expert_linear", x, program.named("first"), None, LOW, 0, routing, program.view(low, 1, 8))
    for number in range(products):
        name = "packed_linear_add" if is_added else "packed_linear"
        program.op(name, x, program.named(f"weight.{number}"), None, spec, 8 * number, product)
    program.op("add_adapters", low, weights, routing, product)
    if not is_added:
        program.op("gated_mul", product, "silu", out)
    return program.build(product)


@pytest.mark.parametrize("is_added", [False, True])
def test_a_layer_with_adapters_is_one_op(is_added: bool) -> None:
    program = layer(1, is_added)
    (op,) = with_fused_adapters(program).ops
    first, *_, last = program.ops
    x, adapters, routing, base, room, out = op.arguments
    assert (op.name, x, routing) == ("adapted_linear", first.arguments[0], first.arguments[5])
    assert isinstance(adapters, tuple)
    assert isinstance(base, tuple)
    assert adapters[:2] == (first.arguments[1], LOW)
    assert base[2:] == (LOW, "add" if is_added else "silu")
    assert (room, out) == ((None, program.output) if is_added else (program.output, last.arguments[2]))


def test_a_layer_of_several_products_stays_as_it_is() -> None:
    program = layer(2)
    assert with_fused_adapters(program).ops == program.ops
    assert with_expanded_products(program).ops == program.ops


@pytest.mark.parametrize("is_added", [False, True])
def test_a_layer_and_its_adapters_second_product_are_one_op(is_added: bool) -> None:
    program = layer(1, is_added, GATED)
    first, op = with_expanded_products(program).ops
    low, _, _, changed = program.ops[2].arguments
    assert (first, op.name) == (program.ops[0], "expanded_linear")
    x, read, _, _, base, out = op.arguments
    assert isinstance(base, tuple)
    assert (x, read) == (first.arguments[0], low)
    assert base[2:] == (GATED, "add" if is_added else "silu")
    assert out == (changed if is_added else program.ops[-1].arguments[-1])


def test_an_activation_of_parts_that_are_not_interleaved_stays_an_op() -> None:
    program = layer(1)
    assert [op.name for op in with_expanded_products(program).ops] == ["expert_linear", "expanded_linear", "gated_mul"]
