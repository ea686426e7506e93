"""Decode over paged latents, beside FlashInfer (each of its kernels) and FlashMLA."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.bench.attention import WORKSPACE_BYTES
from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.attention.prefill import PrefillPlan, plan_prefill
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.latent.attend.attend import (
    Cutting,
    Mode,
    Queries,
    attend_workspace,
    cutting,
    latent_attend,
    tile_rows_of,
)

BF16 = torch.bfloat16
LATENT, TURNED = 512, 64
SCALE = 192**-0.5
"""The scale of scores with DeepSeek's keys."""


@dataclass(frozen=True)
class Shape:
    heads: int
    requests: int
    tokens: int
    queries: int = 1
    """The number of queries of a request: drafts that are checked."""
    page: int = 64

    @property
    def name(self) -> str:
        rows = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.requests} x {self.tokens:,}, {self.heads} heads{rows}"

    @property
    def kv_bytes(self) -> int:
        return self.requests * self.tokens * (LATENT + TURNED) * 2


def latent_cases() -> Iterator[Case]:
    """Heads of a rank of eight, of two, and of one; drafts; one request alone."""
    shapes = [Shape(h, r, n) for h, r, n in itertools.product((16, 64, 128), (64, 128), (1024, 8192, 32768))]
    shapes += [Shape(h, 1, 32768) for h in (16, 128)] + [Shape(128, 64, 8192, queries=q) for q in (2, 4)]
    shapes += [Shape(128, 64, 8192, page=16), Shape(16, 64, 8192, queries=4)]
    for shape in shapes:
        name = shape.name + (f", pages of {shape.page}" if shape.page != 64 else "")
        yield Case("latent", name, partial(build_latent, shape), shape.kv_bytes)


@dataclass(frozen=True)
class _Inputs:
    q: Tensor
    """[rows, heads, LATENT + TURNED]"""
    cache: Tensor
    tables: list[PageTable]
    plan: PrefillPlan | None
    out: Tensor

    @property
    def queries(self) -> Queries:
        return Queries(self.q[..., :LATENT].contiguous(), self.q[..., LATENT:].contiguous())


def _inputs(shape: Shape, sets: int, device: str) -> _Inputs:
    """One pool of random pages, of which each set has its own, shuffled."""
    count = -(-shape.tokens // shape.page)
    pages = torch.randperm(sets * shape.requests * count, device=device).int().view(sets, -1)
    indptr = torch.arange(shape.requests + 1, dtype=torch.int32, device=device) * count
    lens = torch.full((shape.requests,), shape.tokens, dtype=torch.int32, device=device)
    rows = shape.requests * shape.queries, shape.heads
    lengths = [shape.tokens] * shape.requests
    return _Inputs(
        torch.randn(*rows, LATENT + TURNED, dtype=BF16, device=device),
        torch.randn(pages.numel(), 1, shape.page, LATENT + TURNED, dtype=BF16, device=device),
        [PageTable(indptr, of_set.contiguous(), lens) for of_set in pages],
        plan_prefill([shape.queries] * shape.requests, lengths, 1, device) if shape.queries > 1 else None,
        torch.empty(*rows, LATENT, dtype=BF16, device=device),
    )


def build_latent(shape: Shape, device: str) -> Built:
    sets = sets_for(shape.kv_bytes)
    inputs = _inputs(shape, sets, device)
    queries, workspace = inputs.queries, attend_workspace(LATENT, device)
    kernels = {"allspan": Cutting(tile_rows_of(shape.heads) if inputs.plan is None else 64)}
    if (chosen := cutting(queries, inputs.cache, inputs.plan)).is_sm90:
        kernels["allspan wgmma"] = chosen

    def ours(name: str) -> Launch:
        mode = Mode(cutting=kernels[name])
        pages, into = (inputs.cache, None), (inputs.out, None)
        return lambda i: latent_attend(queries, pages, inputs.tables[i], inputs.plan, SCALE, into, workspace, mode)

    def check(name: str) -> None:
        inputs.out.fill_(float("nan"))
        ours(name)(0)
        for request in {0, shape.requests - 1}:
            rows = slice(request * shape.queries, (request + 1) * shape.queries)
            torch.testing.assert_close(inputs.out[rows].float(), _expected(inputs, request, rows), rtol=1e-2, atol=8e-3)
        assert not inputs.out.isnan().any()

    peers: dict[str, Callable[[], Launch]] = {
        f"FlashInfer {name}": _peer_flashinfer(inputs, shape, name) for name in ("fa2", "fa3")
    }
    peers["FlashMLA"] = _peer_flash_mla(inputs, shape)
    rows = shape.requests * shape.queries * shape.heads
    return Built(
        {name: ours(name) for name in kernels},
        check,
        sets,
        shape.kv_bytes + rows * (2 * LATENT + TURNED) * 2,
        2 * rows * shape.tokens * (2 * LATENT + TURNED),
        peers,
    )


def _expected(inputs: _Inputs, request: int, rows: slice) -> Tensor:
    table = inputs.tables[0]
    held = table.indices[table.indptr[request] : table.indptr[request + 1]].long()
    tokens = inputs.cache[held].flatten(0, 2)[: int(table.kv_lens[request])].float()
    scores = torch.einsum("qhd,td->qht", inputs.q[rows].float(), tokens) * SCALE
    reach = torch.arange(len(tokens) - len(scores), len(tokens), device=tokens.device)[:, None]
    hidden = torch.arange(len(tokens), device=tokens.device) > reach
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return torch.einsum("qht,td->qhd", weights, tokens[:, :LATENT])


def _peer_flashinfer(inputs: _Inputs, shape: Shape, kernel: str) -> Callable[[], Launch]:
    def prepare() -> Launch:
        mla: Any = importlib.import_module("flashinfer.mla")
        device, queries = inputs.q.device, inputs.queries
        starts = torch.arange(shape.requests + 1, dtype=torch.int32, device=device) * shape.queries
        wrappers = []
        for table in inputs.tables:
            room = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            wrapper = mla.BatchMLAPagedAttentionWrapper(room, backend=kernel)
            sizes = shape.heads, LATENT, TURNED, shape.page
            indices = table.indptr, table.indices, table.kv_lens
            wrapper.plan(starts, *indices, *sizes, shape.queries > 1, SCALE, BF16, BF16)
            wrappers.append(wrapper)
        latents, turned = inputs.cache[:, 0, :, :LATENT], inputs.cache[:, 0, :, LATENT:]
        out = torch.empty_like(inputs.out)
        return lambda i: wrappers[i].run(queries.latents, queries.turned, latents, turned, out=out)

    return prepare


def _peer_flash_mla(inputs: _Inputs, shape: Shape) -> Callable[[], Launch]:
    def prepare() -> Launch:
        flash_mla: Any = importlib.import_module("flash_mla")
        q = inputs.q.view(shape.requests, shape.queries, shape.heads, -1)
        cache = inputs.cache.transpose(1, 2)
        lens = inputs.tables[0].kv_lens
        plans = flash_mla.get_mla_metadata(lens, shape.queries * shape.heads, 1)
        tables = [table.indices.view(shape.requests, -1) for table in inputs.tables]
        return lambda i: flash_mla.flash_mla_with_kvcache(
            q, cache, tables[i], lens, LATENT, *plans, softmax_scale=SCALE, causal=True
        )

    return prepare
