"""Programs with ops that are several in one, for backends that have their kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from allspan.kernels.fused_ops import AdapterMatrices, BaseProduct, ExpertChoice, RouterProduct, RowNorm
from allspan.kernels.latent_tensors import LatentPages, LatentRooms, NewLatents
from allspan.worker.program.program import Buffer, Op, Program, Rows, Slot

_Values = tuple[Any, ...]


def with_fused_sums(program: Program) -> Program:
    """A sum over the ranks that is added to the residual stream and normed next is one op with that."""
    ops: list[Op] = []
    for op in program.ops:
        if (
            ops
            and ops[-1].name == "all_reduce"
            and op.name == "add_rms_norm"
            and ops[-1].arguments[0] == op.arguments[0]
        ):
            ops[-1] = replace(op, name="all_reduce_add_rms_norm")
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops))


def with_fused_routers(program: Program) -> Program:
    """A norm of the residual stream, the product of a router with it and the choice of experts are one op."""
    ops: list[Op] = []
    for op in program.ops:
        if op.name == "route" and [each.name for each in ops[-2:]] == ["rms_norm", "linear"]:
            (residual, weight, eps, x), (read, *product) = (cast(_Values, each.arguments) for each in ops[-2:])
            logits, bias, places, spec, *rest = cast(_Values, op.arguments)
            if read == x and product[-1] == logits:
                fused = RowNorm(weight, eps), x, RouterProduct(*product), ExpertChoice(bias, places, spec)
                ops[-2:] = [replace(op, name="norm_route", arguments=(residual, *fused, *rest))]
                continue
        ops.append(op)
    return replace(program, ops=tuple(ops))


def with_settled_routings(program: Program) -> Program:
    """The first product of experts is told where another op lies between it and the choice of experts."""
    ops: list[Op] = []
    for op in program.ops:
        if op.name == "expert_gated_linear" and ops and ops[-1].name not in ("route", "norm_route"):
            op = replace(op, arguments=(*op.arguments, True))
        ops.append(op)
    return replace(program, ops=tuple(ops))


def with_fused_latents(program: Program) -> Program:
    """The append of new latents and the attention that reads them are one op."""
    ops: list[Op] = []
    for op in program.ops:
        if ops and ops[-1].name == "latent_append" and op.name == "latent_attention":
            q, kv, weight, eps, rotation, *written, slots = cast(_Values, ops[-1].arguments)
            queries, weights, *read, meta, absorbed, mixed, out = cast(_Values, op.arguments)
            if queries == q and read == written:
                new, rooms = NewLatents(kv, weight, eps, slots), LatentRooms(absorbed, mixed)
                fused = q, new, rotation, weights, LatentPages(*read), meta, rooms, out
                ops[-1] = replace(op, name="append_and_attend", arguments=fused)
                continue
        ops.append(op)
    return replace(program, ops=tuple(ops))


def with_fused_adapters(program: Program) -> Program:
    """A layer's product, what adapters add to it, and the activation behind both are one op."""
    ops: list[Op] = []
    for op in program.ops:
        ops.append(op)
        if op.name == "add_adapters" and len(ops) > 2:
            ops[-3:] = _adapted(*ops[-3:])
        elif op.name == "gated_mul" and len(ops) > 1:
            ops[-2:] = _activated(*ops[-2:])
    return replace(program, ops=tuple(ops))


_EPILOGUES = {"packed_linear": "store", "packed_linear_add": "add"}


def _adapted(first: Op, product: Op, second: Op) -> tuple[Op, ...]:
    """`adapted_linear`, or these as they are: a layer whose parts are held differently has several products."""
    if first.name != "expert_linear" or product.name not in _EPILOGUES:
        return first, product, second
    x, a, _, low_spec, *_ = cast(_Values, first.arguments)
    read, weight, bias, spec, _, out = cast(_Values, product.arguments)
    _, weights, routing, changed = cast(_Values, second.arguments)
    if read != x or out != changed:
        return first, product, second
    base = BaseProduct(weight, bias, spec, _EPILOGUES[product.name])
    adapters = AdapterMatrices(a, low_spec, *weights)
    return (replace(second, name="adapted_linear", arguments=(x, adapters, routing, base, None, out)),)


def _activated(layer: Op, activation: Op) -> tuple[Op, ...]:
    """`adapted_linear` with the activation, or these as they are."""
    product, name, out = cast(_Values, activation.arguments)
    if layer.name != "adapted_linear" or layer.arguments[-1] != product:
        return layer, activation
    x, adapters, routing, base, *_ = cast(_Values, layer.arguments)
    base = base._replace(epilogue=name)
    return (replace(layer, arguments=(x, adapters, routing, base, product, out)),)


def with_whole_logits(program: Program, widths: tuple[int, ...]) -> Program:
    """Every rank gets the columns of all, `widths` of each, instead of its own."""
    whole = Slot(len(program.slots))
    buffer = Buffer("logits.whole", Rows.LOGITS, (sum(widths),), "logits.whole", is_exact=True)
    gather = Op("all_gather_columns", (program.output, widths, whole), Rows.LOGITS)
    return Program((*program.slots, buffer), (*program.ops, gather), whole)
