"""Decode of a batch that shares its first tokens, beside our plain decode of it and FlashInfer's cascade."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from allspan.kernels.bench.case import Built, Case, Launch
from allspan.kernels.cuda.attention.cascade import CascadeLevel, cascade_workspace, paged_cascade, plan_level
from allspan.kernels.cuda.attention.decode import decode_workspace, paged_decode
from allspan.kernels.cuda.cache.pages import PageTable

BF16 = torch.bfloat16
PAGE, WORKSPACE_BYTES = 16, 128 << 20


@dataclass(frozen=True)
class Shape:
    requests: int
    shared: int
    own: int = 128
    heads: int = 32
    kv_heads: int = 32
    dim: int = 128

    @property
    def name(self) -> str:
        return f"{self.requests} x ({self.shared:,} shared + {self.own}), {self.heads}/{self.kv_heads} heads"

    @property
    def kv_bytes(self) -> int:
        return 4 * self.dim * self.kv_heads * (self.shared + self.requests * self.own)


def cascade_cases() -> Iterator[Case]:
    for shape in (Shape(64, 8192), Shape(16, 8192), Shape(256, 32768), Shape(256, 32768, kv_heads=8)):
        yield Case("cascade", shape.name, partial(build, shape), shape.kv_bytes)


@dataclass(frozen=True)
class _Inputs:
    q: Tensor
    cache: tuple[Tensor, Tensor]
    shared: PageTable
    own: PageTable
    whole: PageTable
    out: Tensor


def _inputs(shape: Shape, device: str) -> _Inputs:
    first, each = shape.shared // PAGE, shape.own // PAGE
    pages = torch.randperm(first + shape.requests * each, device=device).int()
    keys, values = (torch.randn(len(pages), shape.kv_heads, PAGE, shape.dim, dtype=BF16, device=device) for _ in "kv")
    mine = pages[first:].view(shape.requests, each)
    everything = torch.cat((pages[:first].expand(shape.requests, -1), mine), 1)

    def table(indices: Tensor, length: int) -> PageTable:
        requests, count = indices.shape
        indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * count
        lengths = torch.full((requests,), length, dtype=torch.int32, device=device)
        return PageTable(indptr, indices.flatten(), lengths)

    q = torch.randn(shape.requests, shape.heads, shape.dim, dtype=BF16, device=device)
    return _Inputs(
        q,
        (keys, values),
        table(pages[None, :first], shape.shared),
        table(mine, shape.own),
        table(everything, shape.shared + shape.own),
        torch.empty_like(q),
    )


def build(shape: Shape, device: str) -> Built:
    inputs = _inputs(shape, device)
    scale, sizes = shape.dim**-0.5, (shape.heads, shape.kv_heads)
    plan, parts = plan_level([(shape.requests, shape.shared)], shape.heads // shape.kv_heads, shape.kv_heads, device)
    levels = [CascadeLevel(inputs.shared, plan, parts)]
    workspace = cascade_workspace(shape.requests, sizes, shape.dim, parts, device)
    plain = decode_workspace(shape.requests, shape.kv_heads, shape.dim, device)

    def ours(i: int) -> None:
        paged_cascade(inputs.q, inputs.cache, levels, inputs.own, scale, inputs.out, None, workspace)

    def decode(i: int) -> None:
        paged_decode(inputs.q, inputs.cache, inputs.whole, scale, inputs.out, None, plain)

    def check(name: str) -> None:
        inputs.out.fill_(float("nan"))
        ours(0)
        for request in (0, shape.requests - 1):
            torch.testing.assert_close(inputs.out[request].float(), _expected(inputs, request), rtol=1e-2, atol=8e-3)
        assert not inputs.out.isnan().any()

    return Built(
        {"allspan": ours},
        check,
        1,
        shape.kv_bytes + 2 * inputs.q.nbytes,
        4 * shape.requests * (shape.shared + shape.own) * shape.heads * shape.dim,
        {"allspan's plain decode": lambda: decode, "FlashInfer cascade": _peer(inputs, shape)},
    )


def _expected(inputs: _Inputs, request: int) -> Tensor:
    """float32 [heads, dim]."""
    table, dim = inputs.whole, inputs.q.shape[2]
    held = table.indices[table.indptr[request] : table.indptr[request + 1]].long()
    keys, values = (cache[held].transpose(0, 1).flatten(1, 2).float() for cache in inputs.cache)
    q = inputs.q[request].float().view(len(keys), -1, dim)
    weights = (torch.einsum("hgd,hnd->hgn", q, keys) * dim**-0.5).softmax(-1)
    return torch.einsum("hgn,hnd->hgd", weights, values).flatten(0, 1)


def _peer(inputs: _Inputs, shape: Shape) -> Callable[[], Launch]:
    def prepare() -> Launch:
        flashinfer = importlib.import_module("flashinfer")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q.device)
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
        rows = torch.arange(shape.requests + 1, dtype=torch.int32, device=inputs.q.device)
        tables = (inputs.shared, inputs.own)
        wrapper.plan(
            [rows[:: shape.requests].contiguous(), rows],
            [table.indptr for table in tables],
            [table.indices for table in tables],
            [torch.full_like(table.kv_lens, PAGE) for table in tables],
            *(shape.heads, shape.kv_heads, shape.dim, PAGE),
            q_data_type=BF16,
        )
        return lambda i: wrapper.run(inputs.q, inputs.cache)

    return prepare
