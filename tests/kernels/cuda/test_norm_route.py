"""The norm, the router and the choice of experts in one launch: what they are one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.moe.norm_route import norm_route
from allspan.kernels.cuda.moe.route import route
from allspan.kernels.fused_ops import ExpertChoice, RouterProduct, RowNorm
from allspan.kernels.ops import Routing
from allspan.kernels.reference import experts as reference
from allspan.kernels.router_spec import RouterSpec
from allspan.worker.program.fused import with_fused_routers
from allspan.worker.program.program import ProgramBuilder, Rows
from support.emulator.driver import EmulatorDriver

EXPERTS = 36
SPECS = {
    "normalised": RouterSpec(8, normalises=True),
    "groups": RouterSpec(6, "sigmoid", 4, 2, normalises=True, scale=1.8),
}


def empty_routing(rows: int, spec: RouterSpec, device: str) -> Routing[Tensor]:
    """Filled with what no op may leave there."""
    integers = [torch.full((rows, spec.top_k), -9, dtype=torch.int32, device=device) for _ in range(2)]
    starts = torch.full((1, EXPERTS + 1), -9, dtype=torch.int32, device=device)
    return Routing(integers[0], torch.full((rows, spec.top_k), -9.0, device=device), integers[1], starts)


@pytest.mark.parametrize("name", SPECS)
def test_one_launch_chooses_what_three_do(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(modules, "driver", lambda: EmulatorDriver(capability=(9, 0)))
    spec, generator = SPECS[name], torch.Generator().manual_seed(4)
    places = torch.arange(EXPERTS, dtype=torch.int32, device=device)[None]
    for rows, width in ((1, 2052), (2, 36), (5, 64)):
        residual, weight = (torch.randn(n, width, generator=generator).to(device) for n in (rows, EXPERTS))
        weight[7] = weight[9]
        norm = RowNorm(torch.rand(width, generator=generator).to(device) + 0.5, 1e-6)
        biases = [torch.randn(EXPERTS, generator=generator).to(device) for _ in range(2)]
        numbers = torch.arange(rows, dtype=torch.int32, device=device)
        if rows > 1:
            residual[0], numbers[1] = torch.nan, -1
        found: list[tuple[Any, ...]] = []
        for op in (norm_route, reference.norm_route):
            x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
            product = RouterProduct(weight, biases[0], torch.zeros(rows, EXPERTS, device=device))
            routing, load = empty_routing(rows, spec, device), torch.zeros(EXPERTS, dtype=torch.int64, device=device)
            op(residual, norm, x, product, ExpertChoice(biases[1], places, spec), routing, load, numbers)
            found.append((x, product.logits, routing, load))
        (x, logits, routing, load), (right_x, right_logits, right, right_load) = found
        torch.testing.assert_close(x, right_x, rtol=1e-2, atol=0, equal_nan=True)
        torch.testing.assert_close(logits, right_logits, rtol=1e-3, atol=0.02, equal_nan=True)
        again = empty_routing(rows, spec, device)
        route(logits, biases[1], places, spec, again, None, numbers)
        for mine, its in ((routing.places, again.places), (routing.weights, again.weights)):
            assert torch.equal(mine.nan_to_num(7), its.nan_to_num(7))
        slots = int(routing.starts[0, -1])
        assert torch.equal(routing.starts, again.starts)
        assert torch.equal(routing.slots.view(-1)[:slots], again.slots.view(-1)[:slots])
        assert int(load.sum()) == int(right_load.sum()) == slots
        if rows == 1:
            assert torch.equal(routing.places, right.places)


def test_programs_have_one_op_for_three_that_follow_each_other() -> None:
    program = ProgramBuilder()
    residual, x, logits = (program.buffer(name, Rows.TOKENS, 8, is_exact=name != "x") for name in ("r", "x", "logits"))
    norm, weight, places, load, rows = map(program.named, ("norm", "weight", "places", "load", "rows"))
    routing = Routing(*(program.buffer(f"routing {i}", Rows.TOKENS, 2) for i in range(4)))
    for read in (x, residual):  # the second product is of something else than what was normed
        program.op("rms_norm", residual, norm, 1e-6, x)
        program.op("linear", read, weight, None, logits)
        program.op("route", logits, None, places, RouterSpec(2), routing, load, rows)
    fused, *others = with_fused_routers(program.build(x)).ops
    assert [fused.name, *(op.name for op in others)] == ["norm_route", "rms_norm", "linear", "route"]
    assert fused.arguments == (
        residual,
        RowNorm(norm, 1e-6),
        x,
        RouterProduct(weight, None, logits),
        ExpertChoice(None, places, RouterSpec(2)),
        routing,
        load,
        rows,
    )
