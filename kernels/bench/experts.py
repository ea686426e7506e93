"""Times the CPU's products with experts: `python -m allspan.kernels.bench.experts SETTINGS`, a JSON object whose keys
are the arguments of `run`. Standard output gets a JSON object a line: {"machine"}, then a {"case"} each, or
{"error"}."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet, Routing
from allspan.kernels.packed_spec import FORMATS, PackedSpec
from allspan.kernels.router_spec import RouterSpec
from allspan.kernels.table import op_set

_FILL = 0x2C
"""A byte that makes finite scales and codes in every format: what takes time does not depend on the values."""
_SETS = 5
"""Routings that take turns, so that few rows find their experts in no cache."""
_ZIPF = 1.1
_COPY_BYTES = 256 << 20
_ROUND_S = 0.05


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer: the hidden size, experts, those of a token, and the columns of one."""

    hidden: int
    experts: int
    top_k: int
    width: int


@dataclass(frozen=True)
class Layer:
    """One layer's experts, and the same product as a dense layer, of the first expert's weights."""

    up: PackedSpec
    down: PackedSpec
    up_weights: Tensor
    down_weights: Tensor


def run(
    shape: dict[str, int],
    rows: Sequence[int],
    formats: Sequence[str],
    routings: Sequence[str],
    threads: int,
    rounds: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    ops, sizes = op_set("cpu", threads), Shape(**shape)
    if unknown := [name for name in formats if name not in FORMATS or name.startswith("fp8")]:
        known = (name for name in FORMATS if not name.startswith("fp8"))
        yield {"error": f"formats: there is no {unknown[0]!r} on the CPU, but {', '.join(known)}"}
        return
    copy = _copy_gb_s(threads, rounds)
    yield {"machine": {"kernels": ops.name, "threads": threads, "copy_gb_s": copy}}
    for name in formats:
        layer = _layer(name, sizes)
        for count, kind in itertools.product(rows, routings):
            generator = torch.Generator().manual_seed(seed)
            yield {"case": _case(ops, sizes, layer, kind, count, generator, rounds) | {"format": name}}


def _layer(name: str, shape: Shape) -> Layer:
    activation = "a8" if FORMATS[name].is_quantised else name
    group = 128 if name.startswith("group") else 0
    up = PackedSpec(name, activation, (shape.width,) * 2, shape.hidden, group=group, interleaved=True)
    down = PackedSpec(name, activation, (shape.hidden,), shape.width, group=group)
    weights = [torch.full((shape.experts, *spec.shape), _FILL, dtype=torch.uint8) for spec in (up, down)]
    return Layer(up, down, weights[0], weights[1])


def logits_of(kind: str, rows: int, experts: int, generator: torch.Generator) -> Tensor:
    """Returns logits whose largest are a draw without replacement: every expert as likely ("uniform"), the expert of
    rank r as likely as 1 / r^1.1 ("zipf"), or the same for all rows ("one")."""
    if kind == "one":
        return torch.randn(1, experts, generator=generator).expand(rows, experts).contiguous()
    noise = -torch.log(-torch.log(torch.rand(rows, experts, generator=generator).clamp(1e-9, 1 - 1e-7)))
    if kind == "uniform":
        return noise
    ranks = torch.randperm(experts, generator=generator) + 1
    return noise - _ZIPF * torch.log(ranks.float())


def routing_of(ops: OpSet, shape: Shape, logits: Tensor) -> Routing[Tensor]:
    rows = len(logits)
    ids, slots = (torch.zeros(rows, shape.top_k, dtype=torch.int32) for _ in range(2))
    starts = torch.zeros(1, shape.experts + 1, dtype=torch.int32)
    routing = Routing(ids, torch.zeros(rows, shape.top_k), slots, starts)
    places = torch.arange(shape.experts, dtype=torch.int32)[None]
    ops.route(logits, None, places, RouterSpec(shape.top_k, normalises=True), routing)
    return routing


def _case(
    ops: OpSet, shape: Shape, layer: Layer, kind: str, rows: int, generator: torch.Generator, rounds: int
) -> dict[str, Any]:
    logits = [logits_of(kind, rows, shape.experts, generator) for _ in range(_SETS)]
    routings = [routing_of(ops, shape, each) for each in logits]
    x, total = torch.randn(rows, shape.hidden, generator=generator), torch.zeros(rows, shape.hidden)
    mlp = torch.zeros(rows, shape.top_k, shape.width)
    slots = rows * shape.top_k
    many, wide, tall = (
        torch.randn(slots, shape.hidden),
        torch.zeros(slots, shape.width),
        torch.zeros(slots, shape.hidden),
    )

    def gated(i: int) -> None:
        ops.expert_gated_linear(x, layer.up_weights, None, layer.up, "silu", routings[i], mlp)

    def summed(i: int) -> None:
        ops.expert_sum(mlp, layer.down_weights, None, layer.down, routings[i], False, total)

    def dense(i: int) -> None:
        """The same multiplications with one weight, as if every expert were the same."""
        ops.packed_gated_linear(many, layer.up_weights[i], None, layer.up, 0, "silu", wide)
        ops.packed_linear(wide, layer.down_weights[i], None, layer.down, 0, tall)

    def route(i: int) -> None:
        routing_of(ops, shape, logits[i])

    us = _times({"route": route, "gated": gated, "sum": summed, "dense": dense}, rounds)
    loads = [each.starts[0].diff() for each in routings]
    distinct = statistics.mean(int((load > 0).sum()) for load in loads)
    each_bytes = layer.up_weights[0].nbytes, layer.down_weights[0].nbytes
    busiest = statistics.mean(float(load.max()) * shape.experts / slots for load in loads)
    return {
        "rows": rows,
        "routing": kind,
        "distinct": distinct,
        "imbalance": busiest,
        "load": loads[0].tolist(),
        "num_bytes": distinct * sum(each_bytes),
        "gated_bytes": distinct * each_bytes[0],
        "flops": 6 * slots * shape.hidden * shape.width,
        "us": us,
    }


def _times(sides: dict[str, Callable[[int], None]], rounds: int) -> dict[str, float]:
    """Medians of microseconds a call; sides take turns."""
    turns = {}
    for name, side in sides.items():
        side(0)
        started = time.perf_counter()
        side(1)
        turns[name] = max(1, min(200, int(_ROUND_S / (time.perf_counter() - started))))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, side in sides.items():
            started = time.perf_counter()
            for i in range(turns[name]):
                side((turn + i) % _SETS)
            found[name].append((time.perf_counter() - started) / turns[name] * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def _copy_gb_s(threads: int, rounds: int) -> float:
    """Returns the bytes read and written a second by a copy of memory that no cache holds, in gigabytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.zeros(_COPY_BYTES, dtype=torch.uint8)

    def copy(_: int) -> None:
        target.copy_(source)

    us = _times({"copy": copy}, rounds)["copy"]
    torch.set_num_threads(before)
    return 2 * _COPY_BYTES / us / 1e3


def main() -> int:
    for line in run(**json.loads(sys.argv[1])):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
