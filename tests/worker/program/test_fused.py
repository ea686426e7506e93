"""Programs with ops that are several in one."""

from __future__ import annotations

import pytest

from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.latent_tensors import LatentPages, LatentRooms, LatentWeights, NewLatents
from allspan.kernels.ops import Rotation, Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.worker.program.fused import with_fused_adapters, with_fused_latents, with_settled_routings
from allspan.worker.program.program import Program, ProgramBuilder, Rows

LOW = PackedSpec("bf16", "bf16", (16,), 8, memory="rows")


def layer(products: int, is_added: bool = False) -> Program:
    """A gated layer with adapters, or one that is added, whose own weight is several."""
    program = ProgramBuilder()
    x, low, product, out = (program.buffer(name, Rows.TOKENS, 8) for name in ("x", "low", "product", "out"))
    routing, weights = Routing(*map(program.named, "abcd")), AdapterWeights(*map(program.named, "efg"))
    program.op("expert_linear", x, program.named("first"), None, LOW, 0, routing, program.view(low, 1, 8))
    for number in range(products):
        name = "packed_linear_add" if is_added else "packed_linear"
        program.op(name, x, program.named(f"weight.{number}"), None, LOW, 8 * number, product)
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


def test_new_latents_and_the_attention_that_reads_them_are_one_op() -> None:
    program = ProgramBuilder()
    q, kv, out = (program.buffer(name, Rows.TOKENS, 8) for name in ("q", "kv", "out"))
    cache, other, norm, slots, meta = map(program.named, ("cache", "other", "norm", "slots", "meta"))
    rotation, weights = Rotation(*map(program.named, ("positions", "cos_sin"))), LatentWeights(norm, norm)
    for read in (cache, other):  # the second attends over other pages
        program.op("latent_append", q, kv, norm, 1e-6, rotation, cache, None, slots)
        program.op("latent_attention", q, weights, read, None, meta, q, kv, out)
    fused, *others = with_fused_latents(program.build(out)).ops
    assert [fused.name, *(op.name for op in others)] == ["append_and_attend", "latent_append", "latent_attention"]
    new, rooms = NewLatents(kv, norm, 1e-6, slots), LatentRooms(q, kv)
    assert fused.arguments == (q, new, rotation, weights, LatentPages(cache, None), meta, rooms, out)


def test_experts_know_whether_an_op_lies_between_them_and_their_choice() -> None:
    program = ProgramBuilder()
    x, out = (program.buffer(name, Rows.TOKENS, 8) for name in ("x", "out"))
    for between in ([], ["packed_gated_linear"]):
        for name in ("norm_route", *between, "expert_gated_linear"):
            program.op(name, x, out)
    told = [op.arguments[2:] for op in with_settled_routings(program.build(out)).ops]
    assert told == [(), (), (), (), (True,)]
