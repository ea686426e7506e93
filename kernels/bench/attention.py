"""Decode and prefill over paged KV, beside FlashInfer (each of its kernels) and torch's attention through cuDNN."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.attention.decode import decode_workspace, paged_decode
from allspan.kernels.cuda.attention.prefill import paged_prefill, plan_prefill
from allspan.kernels.cuda.attention.prefill_sm90 import CAPABILITY, paged_prefill_sm90
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.jit.modules import gpu
from allspan.kernels.reference.attention import QUANTISED

BF16, INT8, UINT4 = torch.bfloat16, torch.int8, torch.uint8
NAMES = {BF16: "bf16", INT8: "int8", UINT4: "uint4"}
WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class Shape:
    requests: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dtype: torch.dtype = BF16
    dim: int = 128
    page: int = 16

    @property
    def name(self) -> str:
        kind = "" if self.dtype is BF16 else f", {NAMES[self.dtype]}"
        return f"{self.requests} x {self.tokens:,}, {self.heads}/{self.kv_heads} heads{kind}"

    @property
    def kv_bytes(self) -> int:
        """Keys and values, with zeros and scales."""
        row = {BF16: self.dim * 2, INT8: self.dim + 8, UINT4: self.dim // 2 + 8}[self.dtype]
        return 2 * self.requests * self.tokens * self.kv_heads * row


def decode_cases() -> Iterator[Case]:
    """The sweep of requests, tokens and query heads a KV head; small ones; quantised pages."""
    shapes = [Shape(r, n) for r, n in itertools.product((1, 8, 64, 256), (1024, 4096, 32768))]
    shapes += [Shape(128, 2048), *(Shape(r, n) for r, n in itertools.product((1, 4), (512, 2048)))]
    for heads, kv_heads in ((8, 8), (28, 4), (64, 8)):
        shapes += [Shape(r, n, heads, kv_heads) for r, n in ((1, 1024), (8, 4096), (64, 4096), (256, 1024))]
    for dtype in (INT8, UINT4):
        shapes += [Shape(r, n, dtype=dtype) for r, n in ((1, 1024), (8, 4096), (64, 4096), (256, 1024))]
    for shape in shapes:
        yield Case("decode", shape.name, partial(build_decode, shape), shape.kv_bytes)


def prefill_cases() -> Iterator[Case]:
    for tokens in (2048, 8192, 32768):
        shape = Shape(1, tokens)
        yield Case("prefill", shape.name, partial(build_prefill, shape), shape.kv_bytes)


@dataclass(frozen=True)
class _Inputs:
    q: Tensor
    cache: tuple[Tensor, ...]
    tables: list[PageTable]
    out: Tensor


def _inputs(shape: Shape, queries: int, sets: int, device: str) -> _Inputs:
    """One pool of random pages, of which each set has its own, shuffled; `queries` of each request."""
    count = -(-shape.tokens // shape.page)
    pages = torch.randperm(sets * shape.requests * count, device=device).int().view(sets, -1)
    pool = (pages.numel(), shape.kv_heads, shape.page)
    indptr = torch.arange(shape.requests + 1, dtype=torch.int32, device=device) * count
    lens = torch.full((shape.requests,), shape.tokens, dtype=torch.int32, device=device)
    q = torch.randn(shape.requests * queries, shape.heads, shape.dim, dtype=BF16, device=device)
    return _Inputs(
        q,
        tuple(_random_cache(shape, pool, device)),
        [PageTable(indptr, of_set.contiguous(), lens) for of_set in pages],
        torch.empty_like(q),
    )


def _random_cache(shape: Shape, pool: tuple[int, int, int], device: str) -> Iterator[Tensor]:
    if shape.dtype is BF16:
        yield from (torch.randn(*pool, shape.dim, dtype=BF16, device=device) for _ in range(2))
        return
    kind = QUANTISED[shape.dtype]
    width = shape.dim if shape.dtype is INT8 else shape.dim // 2
    low, high = (-128, 128) if shape.dtype is INT8 else (0, 256)
    yield from (torch.randint(low, high, (*pool, width), dtype=shape.dtype, device=device) for _ in range(2))
    for _ in range(2):
        scales = torch.empty(pool[0], pool[1], 2, pool[2], device=device)
        scales[:, :, 0] = (kind.low + kind.high) / 2
        scales[:, :, 1] = 4 / (kind.high - kind.low)
        yield scales


def _tokens(inputs: _Inputs, which: int, request: int, length: int) -> Tensor:
    """Keys (0) or values (1) of a request of the first set, float32 [kv_heads, length, dim]."""
    table = inputs.tables[0]
    held = table.indices[table.indptr[request] : table.indptr[request + 1]].long()
    pages = inputs.cache[which][held]
    if pages.dtype is not BF16:
        zero, scale = inputs.cache[2 + which][held].unbind(2)
        codes = QUANTISED[pages.dtype].unpack(pages, inputs.q.shape[2])
        pages = (codes.float() - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    return pages.transpose(0, 1).flatten(1, 2)[:, :length].float()


def _expected(inputs: _Inputs, shape: Shape, request: int, rows: Tensor, is_causal: bool) -> Tensor:
    """Returns attention float32 [rows, heads, dim] of these rows of q, all of one request; the last sees all tokens."""
    keys, values = (_tokens(inputs, which, request, shape.tokens) for which in (0, 1))
    group = shape.heads // shape.kv_heads
    q = inputs.q[rows].float().view(len(rows), shape.kv_heads, group, shape.dim)
    scores = torch.einsum("rhgd,hnd->rhgn", q, keys) * shape.dim**-0.5
    if is_causal:
        hidden = torch.arange(shape.tokens, device=rows.device) > rows[:, None]
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
    return torch.einsum("rhgn,hnd->rhgd", scores.softmax(-1), values).flatten(1, 2)


def build_decode(shape: Shape, device: str) -> Built:
    sets = sets_for(shape.kv_bytes)
    inputs = _inputs(shape, 1, sets, device)
    workspace = decode_workspace(shape.requests, shape.kv_heads, shape.dim, device)
    cache: Any = inputs.cache

    def ours(i: int) -> None:
        paged_decode(inputs.q, cache, inputs.tables[i], shape.dim**-0.5, inputs.out, None, workspace)

    def check(name: str) -> None:
        inputs.out.fill_(float("nan"))
        ours(0)
        for request in {0, shape.requests - 1}:
            rows = torch.tensor([request], device=device)
            right = _expected(inputs, shape, request, rows, is_causal=False)
            torch.testing.assert_close(inputs.out[rows].float(), right, rtol=1e-2, atol=8e-3)
        assert not inputs.out.isnan().any()

    peers = {"FlashInfer": False, "FlashInfer tensor cores": True}
    return Built(
        {"allspan": ours},
        check,
        sets,
        shape.kv_bytes + 2 * inputs.q.nbytes,
        4 * shape.requests * shape.tokens * shape.heads * shape.dim,
        {name: _peer_decode(inputs, shape, cores) for name, cores in peers.items()} if shape.dtype is BF16 else {},
    )


@cache
def _workspace(device: torch.device) -> Tensor:
    """Returns the workspace of FlashInfer's wrappers, whose launches follow each other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _peer_decode(inputs: _Inputs, shape: Shape, use_tensor_cores: bool) -> Callable[[], Launch]:
    def prepare() -> Launch:
        flashinfer = importlib.import_module("flashinfer")
        wrappers = []
        last = torch.full_like(inputs.tables[0].kv_lens, (shape.tokens - 1) % shape.page + 1)
        for table in inputs.tables:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(inputs.q.device), "HND", use_tensor_cores=use_tensor_cores
            )
            sizes = shape.heads, shape.kv_heads, shape.dim, shape.page
            wrapper.plan(table.indptr, table.indices, last, *sizes, q_data_type=BF16, kv_data_type=BF16)
            wrappers.append(wrapper)
        out = torch.empty_like(inputs.out)
        return lambda i: wrappers[i].run(inputs.q, inputs.cache, out=out)

    return prepare


def build_prefill(shape: Shape, device: str) -> Built:
    inputs = _inputs(shape, shape.tokens, 1, device)
    group = shape.heads // shape.kv_heads
    plan = plan_prefill([shape.tokens] * shape.requests, [shape.tokens] * shape.requests, group, device)
    cache: Any = inputs.cache
    kernels: dict[str, Callable[..., None]] = {"allspan": paged_prefill}
    if gpu(torch.device(device)).capability == CAPABILITY:
        kernels["allspan wgmma"] = paged_prefill_sm90

    def ours(name: str) -> Launch:
        arguments = (inputs.q, cache, inputs.tables[0], plan, shape.dim**-0.5, True, inputs.out, None)
        return lambda i: kernels[name](*arguments)

    def check(name: str) -> None:
        inputs.out.fill_(float("nan"))
        ours(name)(0)
        ends = torch.arange(min(32, shape.tokens), device=device)
        rows = torch.cat((ends, shape.tokens // 2 + ends[:1], shape.tokens - 1 - ends))
        right = _expected(inputs, shape, 0, rows, is_causal=True)
        torch.testing.assert_close(inputs.out[rows].float(), right, rtol=1e-2, atol=8e-3)
        assert not inputs.out.isnan().any()

    peers = {f"FlashInfer {name}": _peer_prefill(inputs, shape, name) for name in ("fa2", "fa3")}
    peers["cuDNN through torch, contiguous"] = _peer_sdpa(inputs, shape)
    return Built(
        {name: ours(name) for name in kernels},
        check,
        1,
        shape.kv_bytes + 2 * inputs.q.nbytes,
        2 * shape.requests * shape.tokens * (shape.tokens + 1) * shape.heads * shape.dim,
        peers,
    )


def _peer_prefill(inputs: _Inputs, shape: Shape, kernel: str) -> Callable[[], Launch]:
    def prepare() -> Launch:
        flashinfer = importlib.import_module("flashinfer")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(inputs.q.device), "HND", backend=kernel)
        table = inputs.tables[0]
        starts = torch.arange(shape.requests + 1, dtype=torch.int32, device=inputs.q.device) * shape.tokens
        last = torch.full_like(table.kv_lens, (shape.tokens - 1) % shape.page + 1)
        sizes = shape.heads, shape.kv_heads, shape.dim, shape.page
        wrapper.plan(starts, table.indptr, table.indices, last, *sizes, causal=True, q_data_type=BF16)
        out = torch.empty_like(inputs.out)
        return lambda i: wrapper.run(inputs.q, inputs.cache, out=out)

    return prepare


def _peer_sdpa(inputs: _Inputs, shape: Shape) -> Callable[[], Launch]:
    def prepare() -> Launch:
        attention: Any = importlib.import_module("torch.nn.attention")
        q = inputs.q.view(shape.requests, shape.tokens, shape.heads, shape.dim).transpose(1, 2)
        keys, values = (_tokens(inputs, which, 0, shape.tokens).to(BF16)[None] for which in (0, 1))

        def run(i: int) -> None:
            with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

        return run

    return prepare
