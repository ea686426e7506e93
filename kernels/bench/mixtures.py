"""The experts of one layer, of Qwen3-30B-A3B's shape and of gpt-oss-120b's, beside torch's grouped product and Triton's
kernel with bfloat16 weights (and with e4m3 ones for fp8); and the choice of experts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.moe.product import expert_gated_linear, expert_sum
from allspan.kernels.cuda.moe.route import route
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.packed_linear import unpack
from allspan.kernels.router_spec import RouterSpec
from allspan.kernels.row_layout import codes_of, qparams_of

KINDS = {
    "bf16": ("bf16", 0, "bf16"),
    "fp8": ("fp8", 0, "e4m3"),
    "fp8 blocks": ("fp8_block", 0, "e4m3"),
    "uint4": ("group4", 128, "a16"),
    "mxfp4": ("mxfp4", 0, "a8"),
}
"""Format, group and activation."""
ROWS = (1, 2, 4, 8, 64, 256, 1024, 8192)
ROUTED_ROWS = (1, 8, 16, 64)
_CHECKED = 4
"""Rows that are compared."""


@dataclass(frozen=True)
class Shape:
    rows: int
    kind: str
    hidden: int = 2048
    experts: int = 128
    chosen: int = 8
    width: int = 768

    def spec(self, parts: tuple[int, ...], inputs: int) -> PackedSpec:
        name, group, activation = KINDS[self.kind]
        return PackedSpec(name, activation, parts, inputs, group=group, memory="rows")

    @property
    def up(self) -> PackedSpec:
        return self.spec((self.width, self.width), self.hidden)

    @property
    def down(self) -> PackedSpec:
        return self.spec((self.hidden,), self.width)

    @property
    def expert_bytes(self) -> int:
        return sum(spec.shape[0] * spec.shape[1] for spec in (self.up, self.down))


def mixture_cases() -> Iterator[Case]:
    for kind in KINDS:
        sizes = (2880, 128, 4, 2880) if kind == "mxfp4" else (2048, 128, 8, 768)
        for rows in ROWS:
            shape = Shape(rows, kind, *sizes)
            words = f"{rows:,} row{'s' * (rows > 1)} to {shape.chosen} of 128 experts of {shape.width:,}, {kind}"
            yield Case("experts", words, partial(build, shape), 2 * shape.experts * shape.expert_bytes)
    for rows in ROUTED_ROWS:
        words = f"the choice of 8 of 128 experts for {rows} row{'s' * (rows > 1)}"
        yield Case("experts", words, partial(build_router, Shape(rows, "bf16")))


def build_router(shape: Shape, device: str) -> Built:
    logits = [torch.randn(shape.rows, shape.experts, device=device) for _ in range(8)]
    places, routing = torch.arange(shape.experts, dtype=torch.int32, device=device)[None], _empty_routing(shape, device)
    spec = RouterSpec(shape.chosen, normalises=True)

    def ours(i: int) -> None:
        route(logits[i], None, places, spec, routing)

    def check(name: str) -> None:
        ours(0)
        assert torch.equal(routing.places.long(), logits[0].topk(shape.chosen).indices.sort(1).values)

    return Built({"allspan": ours}, check, len(logits), logits[0].nbytes + sum(each.nbytes for each in routing))


def build(shape: Shape, device: str) -> Built:
    up, down = (_random_weights(spec, shape.experts, device) for spec in (shape.up, shape.down))
    touched = shape.experts * (1 - (1 - shape.chosen / shape.experts) ** shape.rows)
    sets = sets_for(int(touched * shape.expert_bytes))
    routings = [_random_routing(shape, device) for _ in range(sets)]
    x = torch.randn(shape.rows, shape.hidden, device=device).bfloat16()
    mlp = torch.empty(shape.rows, shape.chosen, shape.width, dtype=torch.bfloat16, device=device)
    out = torch.empty(shape.rows, shape.hidden, dtype=torch.bfloat16, device=device)

    def ours(i: int) -> None:
        expert_gated_linear(x, up, None, shape.up, "silu", routings[i], mlp)
        expert_sum(mlp, down, None, shape.down, routings[i], False, out)

    def check(name: str) -> None:
        out.fill_(float("nan"))
        ours(0)
        some = range(0, shape.rows, max(1, shape.rows // _CHECKED))
        for row in some:
            right = torch.zeros(shape.hidden, device=device)
            for place, factor in zip(routings[0].places[row].tolist(), routings[0].weights[row], strict=True):
                gate, upper = (unpack(up[place], shape.up, torch.float32) @ x[row].float()).chunk(2)
                chosen = (functional.silu(gate) * upper).bfloat16().float()
                right += factor * (unpack(down[place], shape.down, torch.float32) @ chosen)
            error = (out[row].float() - right).norm() / right.norm()
            assert error < (0.08 if shape.kind.startswith("fp8") else 0.02), f"row {row} is off by {error:.3f}"
        assert not out.isnan().any()

    num_bytes = int(touched * shape.expert_bytes) + x.nbytes + out.nbytes
    flops = 6 * shape.rows * shape.chosen * shape.hidden * shape.width
    peers = {
        "torch grouped_mm bf16": partial(_grouped, shape, x, routings),
        "Triton fused_moe bf16": partial(_triton, shape, x, routings, torch.bfloat16),
    }
    if shape.kind == "fp8":
        peers["Triton fused_moe fp8"] = partial(_triton, shape, x, routings, torch.float8_e4m3fn)
    return Built({"allspan": ours}, check, sets, num_bytes, flops, peers)


def _grouped(shape: Shape, x: Tensor, routings: list[Routing[Tensor]]) -> Launch:
    """Prepares what torch has for it: rows sorted by expert, products of groups of them, and sums of a token's."""
    found: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    sizes = (shape.experts, shape.hidden, 2 * shape.width), (shape.experts, shape.width, shape.hidden)
    up, down = (torch.randn(e, n, k, device=x.device).bfloat16().transpose(1, 2) / k**0.5 for e, k, n in sizes)
    back = [routing.slots.view(-1).argsort() for routing in routings]

    def launch(i: int) -> Tensor:
        routing = routings[i]
        ends = routing.starts[0, 1:]
        gate, upper = found(x[routing.slots.view(-1) // shape.chosen], up, offs=ends).chunk(2, 1)
        products = found(functional.silu(gate) * upper, down, offs=ends)
        own = products[back[i]].view(shape.rows, shape.chosen, shape.hidden)
        out: Tensor = (own * routing.weights[..., None]).sum(1).bfloat16()
        return out

    launch(0)
    return launch


def _triton(shape: Shape, x: Tensor, routings: list[Routing[Tensor]], dtype: torch.dtype) -> Launch:
    """Triton's kernel over random weights of this type. Rows of e4m3 have no scale: what takes time does not change."""
    found: Any = importlib.import_module("allspan.kernels.bench.triton_experts")
    sizes = (shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)
    up, down = (torch.randn(e, n, k, dtype=torch.bfloat16, device=x.device) / k**0.5 for e, n, k in sizes)
    launch: Launch = found.fused_moe(x.to(dtype), up.to(dtype), down.to(dtype), routings)
    return launch


def _empty_routing(shape: Shape, device: str) -> Routing[Tensor]:
    rows, chosen, experts = shape.rows, shape.chosen, shape.experts
    integers = [torch.empty(rows, chosen, dtype=torch.int32, device=device) for _ in range(2)]
    starts = torch.empty(1, experts + 1, dtype=torch.int32, device=device)
    return Routing(integers[0], torch.empty(rows, chosen, device=device), integers[1], starts)


def _random_routing(shape: Shape, device: str) -> Routing[Tensor]:
    routing, places = _empty_routing(shape, device), torch.arange(shape.experts, dtype=torch.int32, device=device)[None]
    logits = torch.randn(shape.rows, shape.experts, device=device)
    route(logits, None, places, RouterSpec(shape.chosen, normalises=True), routing)
    return routing


def _random_weights(spec: PackedSpec, experts: int, device: str) -> Tensor:
    weights = torch.randint(0, 256, (experts, *spec.shape), dtype=torch.uint8, device=device)
    size = spec.inputs**-0.5
    for weight in weights:
        codes, qparams = codes_of(weight, spec), qparams_of(weight, spec)
        if not spec.kind.is_quantised:
            codes.normal_(std=size)
        elif spec.kind.is_e4m3:
            codes.copy_((torch.randn(codes.shape, device=device) * 16).to(torch.float8_e4m3fn).view(torch.uint8))
            qparams.fill_(0)
            qparams[..., 0] = size / 16
        elif spec.kind.is_float:
            qparams.fill_(125 + round(math.log2(size)))
        else:
            qparams[..., 0] = size * 4 / (1 << spec.kind.bits)
            qparams[..., 1] = qparams[..., 0] * (1 << spec.kind.bits) / 2
    return weights
