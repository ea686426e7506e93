"""Both products of low-rank adapters of one layer, for rows that all have one adapter or each another, beside torch's
grouped product and products with a copy of each row's matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.adapters.expand import expand
from allspan.kernels.cuda.adapters.shrink import shrink
from allspan.kernels.library.adapters import LoRAWeights, routed

ROWS = (1, 16, 64, 256, 1024)
RANKS = (16, 64)
_MOST_COPIED = 64
"""Rows up to which products with copies are tried."""


@dataclass(frozen=True)
class Shape:
    rows: int
    distinct: int
    """Adapters that the rows have in turn."""
    rank: int = 16
    adapters: int = 32
    inputs: int = 4096
    outputs: int = 4096

    @property
    def adapter_bytes(self) -> int:
        return 2 * self.rank * (self.inputs + self.outputs)


def adapter_cases() -> Iterator[Case]:
    for rank in RANKS:
        for rows in ROWS:
            for distinct in dict.fromkeys((1, min(rows, 32))):
                shape = Shape(rows, distinct, rank)
                many = "one adapter" if distinct == 1 else f"{distinct} adapters in turn"
                words = f"{rows:,} row{'s' * (rows > 1)}, {many} of rank {rank}, {shape.inputs:,} to {shape.outputs:,}"
                memory = 8 * shape.adapters * shape.adapter_bytes
                yield Case("adapters", words, partial(build, shape), memory)


def build(shape: Shape, device: str) -> Built:
    generator = torch.Generator().manual_seed(0)
    sets = min(4, sets_for(shape.distinct * shape.adapter_bytes))
    sizes = (shape.adapters, shape.rank, shape.inputs), (shape.adapters, shape.outputs, shape.rank)
    plain = [
        [(torch.randn(*size, generator=generator) / size[2] ** 0.5).bfloat16().to(device) for size in sizes]
        for _ in range(sets)
    ]
    weights = [LoRAWeights(a, b, backend="cuda") for a, b in plain]
    indices = (torch.arange(shape.rows) % shape.distinct).int().to(device)
    routing = routed(weights[0], indices)
    x = torch.randn(shape.rows, shape.inputs, generator=generator).bfloat16().to(device)
    y = torch.zeros(shape.rows, shape.outputs, dtype=torch.bfloat16, device=device)

    def ours(i: int) -> None:
        own = weights[i]
        expand(shrink(x, own.a, own.spec, routing), own.second, routing, y)

    def check(name: str) -> None:
        y.fill_(1.0)
        ours(0)
        a, b = plain[0]
        for row in range(0, shape.rows, max(1, shape.rows // 4)):
            place = int(indices[row])
            right = 1 + b[place].float() @ (a[place].float() @ x[row].float())
            torch.testing.assert_close(y[row].float(), right, rtol=0.02, atol=0.02)

    num_bytes = shape.distinct * shape.adapter_bytes + x.nbytes + 2 * y.nbytes
    peers = {"torch grouped_mm": partial(_grouped, plain, indices, x, y)}
    if shape.rows <= _MOST_COPIED:
        peers["torch bmm of copies"] = partial(_copied, plain, indices, x, y)
    return Built({"allspan": ours}, check, sets, num_bytes, 4 * shape.rows * shape.adapter_bytes, peers)


def _grouped(plain: list[list[Tensor]], indices: Tensor, x: Tensor, y: Tensor) -> Launch:
    """Rows sorted by adapter, products of groups of them, and what comes out in the rows' order."""
    found: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    order = indices.sort(stable=True).indices
    ends = torch.bincount(indices, minlength=len(plain[0][0])).cumsum(0).int()

    def launch(i: int) -> None:
        a, b = plain[i]
        low = found(x[order], a.transpose(1, 2), offs=ends)
        y.index_add_(0, order, found(low, b.transpose(1, 2), offs=ends))

    launch(0)
    return launch


def _copied(plain: list[list[Tensor]], indices: Tensor, x: Tensor, y: Tensor) -> Launch:
    def launch(i: int) -> None:
        a, b = plain[i]
        y.add_(torch.bmm(b[indices], torch.bmm(a[indices], x[:, :, None]))[:, :, 0])

    launch(0)
    return launch
