"""Products with experts written in Triton the way that vLLM's and SGLang's `fused_moe` are built: the slots of a step
sorted by expert and padded to whole tiles, a tiled product for gate and up, the activation, a tiled product down that
multiplies by the choice's weight, and a sum of a row's choices. A peer of this project's kernels, which use no Triton.

Every program of a product owns one tile of one expert's products; the fastest of `TILES` is taken. Sorting and padding
are prepared beforehand and not timed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from allspan.kernels.bench.case import Launch
from allspan.kernels.ops import Routing


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = (
    Tile(16, 32, 128, 4, 4),
    Tile(16, 64, 128, 4, 4),
    Tile(16, 64, 256, 4, 3),
    Tile(16, 128, 128, 4, 3),
    Tile(16, 128, 64, 4, 5),
    Tile(32, 128, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
)
_TRIES = 5


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]  # noqa: PLR0913 (a kernel's arguments)
    x, weight, out, slots, tile_experts, factors, num_slots, outputs: tl.constexpr, inputs: tl.constexpr,
    divisor: tl.constexpr, scales: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """out[slot] = x[slot // divisor] · weight[expert of the tile], times factors[slot] where `scales`."""
    tile, block = tl.program_id(1), tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    own = tl.load(slots + tile * rows + tl.arange(0, rows))
    is_used = own < num_slots
    column = block * columns + tl.arange(0, columns)
    inner = tl.arange(0, depth)
    left = x + (own // divisor)[:, None] * inputs + inner[None, :]
    right = weight + expert * outputs * inputs + column[None, :].to(tl.int64) * inputs + inner[:, None]
    sums = tl.zeros((rows, columns), dtype=tl.float32)
    for start in range(0, inputs, depth):
        inside = start + inner < inputs
        a = tl.load(left + start, mask=is_used[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + start, mask=inside[:, None] & (column < outputs)[None, :], other=0.0)
        sums += tl.dot(a, b)
    if scales:
        sums *= tl.load(factors + own, mask=is_used, other=0.0)[:, None]
    place = out + own[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_used[:, None] & (column < outputs)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _activation(products, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(products + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(products + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * upper).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(products, out, hidden, top_k: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros((block,), dtype=tl.float32)
    for i in range(top_k):
        total += tl.load(products + (row * top_k + i) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=inside)


def fused_moe(x: Tensor, up: Tensor, down: Tensor, routings: list[Routing[Tensor]]) -> Launch:
    """A launch over x [rows, hidden], up [experts, 2 width, hidden] and down [experts, hidden, width] of one type
    (bfloat16 or e4m3), with the fastest of `TILES`."""
    sides = [_Side(tile, x, up, down, routings) for tile in TILES]
    return min(sides, key=lambda side: side.once()).launch


class _Side:
    """The products with one tile: everything that a launch reads and writes."""

    def __init__(self, tile: Tile, x: Tensor, up: Tensor, down: Tensor, routings: list[Routing[Tensor]]) -> None:
        self.tile, self.x, self.up, self.down = tile, x, up, down
        self.factors = [routing.weights.reshape(-1) for routing in routings]
        self.plans = [aligned(routing, len(up), tile.rows) for routing in routings]
        slots = routings[0].slots.numel()
        self.top_k = slots // len(x)
        self.products = x.new_empty(slots, up.shape[1], dtype=torch.bfloat16)
        self.mlp = x.new_empty(slots, down.shape[2])
        self.halves = x.new_empty(slots, down.shape[1], dtype=torch.bfloat16)
        self.out = x.new_empty(len(x), down.shape[1], dtype=torch.bfloat16)

    def launch(self, i: int) -> Tensor:
        width, hidden = self.down.shape[2], self.down.shape[1]
        self._multiply(i, self.x, self.up, self.products, self.top_k, False)
        _activation[(triton.cdiv(width, 1024), len(self.mlp))](self.products, self.mlp, width, block=1024)
        self._multiply(i, self.mlp, self.down, self.halves, 1, True)
        _sum[(triton.cdiv(hidden, 1024), len(self.out))](self.halves, self.out, hidden, top_k=self.top_k, block=1024)
        return self.out

    def once(self) -> float:
        """Seconds of a launch; infinite where the tile does not fit the GPU."""
        try:
            for i in range(_TRIES):
                self.launch(i % len(self.plans))
            _synchronize(self.x)
            begin = time.perf_counter()
            for i in range(_TRIES):
                self.launch(i % len(self.plans))
            _synchronize(self.x)
        except triton.runtime.errors.OutOfResources:
            return float("inf")
        return time.perf_counter() - begin

    def _multiply(self, i: int, x: Tensor, weight: Tensor, out: Tensor, divisor: int, scales: bool) -> None:
        tile, (slots, experts) = self.tile, self.plans[i]
        grid = triton.cdiv(weight.shape[1], tile.columns), len(experts)
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        _product[grid](
            x, weight, out, slots, experts, self.factors[i], len(out), weight.shape[1], weight.shape[2],
            divisor=divisor, scales=scales, rows=tile.rows, columns=tile.columns, depth=tile.depth, **options,
        )  # fmt: skip


def aligned(routing: Routing[Tensor], experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The slots sorted by expert, each expert's padded to whole tiles with the number of slots, and the expert of every
    tile."""
    chosen = routing.places.reshape(-1).tolist()
    lists: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(chosen):
        lists[expert].append(slot)
    slots, owners = [], []
    for expert, own in enumerate(lists):
        tiles = -(-len(own) // rows)
        slots += own + [len(chosen)] * (tiles * rows - len(own))
        owners += [expert] * tiles
    device = routing.places.device
    return tuple(torch.tensor(values, dtype=torch.int32, device=device) for values in (slots, owners))  # type: ignore[return-value]


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()
