"""The CPU backend's promise: what it writes for a row has the same bits alone, batched, chunked, on any threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import op_set
from support.kernel_cases import (
    BF16,
    F32,
    GQA_9_3,
    I8,
    U4,
    UNEVEN,
    Meta,
    Scoring,
    append_kv,
    attention,
    linear,
    poison,
    randn,
    rotary,
)
from support.variants import CPU_VARIANTS

FORMATS = {F32: "float32", BF16: "bfloat16", I8: "int8", U4: "uint4"}
pytestmark = pytest.mark.parametrize("backend", CPU_VARIANTS)


def assert_same_bits(ours: Tensor, other: Tensor) -> None:
    assert torch.equal(ours.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "columns"), [(576, 130), (67, 31), (1536, 64), (5, 9)])
def test_linear_rows(backend: str, k: int, columns: int, dtype: torch.dtype) -> None:
    rows = 131
    x, weight, bias, whole = linear(rows, k, columns, dtype, bias=True)
    ops, threaded = op_set(backend), op_set(backend, threads=3)
    ops.linear(x, weight, bias, whole)
    for size in (1, 2, 3, 4, 5, 6, 7, 13, 64, rows):
        parts = poison(rows, columns)
        for first in range(0, rows, size):
            last = min(rows, first + size)
            (threaded if size > 5 else ops).linear(x[first:last], weight, bias, parts[first:last])
        assert_same_bits(parts, whole)


def test_linear_columns(backend: str) -> None:
    """A rank's slice of the columns has the bits of the whole: 1 rank and 2 ranks agree before the all-reduce."""
    x, weight, _, whole = linear(9, 100, 61)
    ops = op_set(backend)
    ops.linear(x, weight, None, whole)
    for first, last in [(0, 30), (30, 61), (7, 8)]:
        part = poison(9, last - first)
        ops.linear(x, weight[first:last].contiguous(), None, part)
        assert_same_bits(part, whole[:, first:last].contiguous())


@pytest.mark.parametrize("width", [576, 33])
def test_rows_of_norms_and_activations(backend: str, width: int) -> None:
    rows = 70
    x, gate_up, weight = randn(rows, width), randn(rows, 2 * width), randn(width)
    ops, threaded = op_set(backend), op_set(backend, threads=2)
    normed, active, residual = poison(rows, width), poison(rows, width), x.clone()
    threaded.rms_norm(x, weight, 1e-5, normed)
    threaded.gated_mul(gate_up, "gelu_tanh", active)
    capped, centered = x.clone(), poison(rows, width)
    threaded.soft_cap(capped, 0.7)
    threaded.layer_norm(x, weight, 1e-5, centered)
    threaded.add_rms_norm(x, residual, weight, 1e-5, poison(rows, width))
    for row in range(rows):
        one, out = slice(row, row + 1), poison(1, width)
        ops.rms_norm(x[one], weight, 1e-5, out)
        assert_same_bits(out, normed[one])
        ops.gated_mul(gate_up[one], "gelu_tanh", out)
        assert_same_bits(out, active[one])
        ops.layer_norm(x[one], weight, 1e-5, out)
        assert_same_bits(out, centered[one])
        kept = x[one].clone()
        ops.soft_cap(kept, 0.7)
        assert_same_bits(kept, capped[one])
        kept = x[one].clone()
        ops.add_rms_norm(x[one], kept, weight, 1e-5, out)
        assert_same_bits(kept, residual[one])


def test_rows_of_rotary(backend: str) -> None:
    q, k, positions, cos_sin = rotary(21, 9, 3, 64, 64)
    alone = [(q[i : i + 1].clone(), k[i : i + 1].clone()) for i in range(21)]
    ops = op_set(backend)
    ops.rotary(q, k, positions, cos_sin)
    for i, (q_one, k_one) in enumerate(alone):
        ops.rotary(q_one, k_one, positions[i : i + 1], cos_sin)
        assert_same_bits(q_one, q[i : i + 1])
        assert_same_bits(k_one, k[i : i + 1])


def attend(backend: str, threads: int, arguments: list[Any]) -> Tensor:
    op_set(backend, threads).attention(*arguments)
    out: Tensor = arguments[-1]
    return out


def cut(arguments: list[Any], first: int, last: int) -> list[Any]:
    """Queries [first, last) of a batch of one whole-prompt request, as a chunk of their own."""
    q, *cache, sinks, meta, _ = arguments
    chunk = Meta(
        torch.tensor([0, last - first], dtype=torch.int32),
        meta.page_indptr,
        meta.page_indices,
        torch.tensor([last], dtype=torch.int32),
        meta.kv_head_of,
        meta.scale,
        meta.window,
        meta.soft_cap,
        meta.slopes,
    )
    return [q[first:last], *cache, sinks, chunk, poison(last - first, *q.shape[1:])]


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.values())
@pytest.mark.parametrize(("dim", "page_size"), [(64, 16), (96, 32), (128, 16), (80, 48), (20, 128)])
def test_attention_chunks(backend: str, dim: int, page_size: int, dtype: torch.dtype) -> None:
    length = 201
    whole = attend(backend, 1, attention(dim, page_size, [(length, length)], UNEVEN, dtype))
    arguments = attention(dim, page_size, [(length, length)], UNEVEN, dtype)
    for chunk, step in ((1, 7), (7, 14), (64, 64), (100, 100)):
        for first in range(0, length, step):
            last = min(length, first + chunk)
            part = attend(backend, 1 + chunk % 2, cut(arguments, first, last))
            assert_same_bits(part, whole[first:last])


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.values())
def test_attention_across_splits(backend: str, dtype: torch.dtype) -> None:
    """A context that threads share has the bits of one that a thread goes through alone, token by token or not."""
    length = 600
    arguments = attention(48, 16, [(length, length)], UNEVEN, dtype)
    whole = attend(backend, 1, arguments)
    for threads in (2, 3):
        assert_same_bits(attend(backend, threads, cut(arguments, 0, length)), whole)
        for first, last in [(255, 256), (256, 257), (255, 258), (511, 520), (length - 1, length), (400, length)]:
            assert_same_bits(attend(backend, threads, cut(arguments, first, last)), whole[first:last])


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.values())
@pytest.mark.parametrize("window", [0, 5, 64, 290])
def test_attention_with_a_window_cap_slopes_and_sinks(backend: str, window: int, dtype: torch.dtype) -> None:
    """Chunks that begin anywhere, shared out over threads, have the bits of the whole prompt."""
    length = 600
    arguments = attention(48, 16, [(length, length)], UNEVEN, dtype, scoring=Scoring(window, 2.0, True, True))
    whole = attend(backend, 1, arguments)
    assert_same_bits(attend(backend, 3, cut(arguments, 0, length)), whole)
    for first, last in [(3, 4), (63, 66), (255, 258), (289, 330), (511, 520), (length - 1, length), (400, length)]:
        assert_same_bits(attend(backend, 2, cut(arguments, first, last)), whole[first:last])


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.values())
def test_attention_among_other_requests(backend: str, dtype: torch.dtype) -> None:
    """The same request alone, first, last, on more threads, and with its pages elsewhere."""
    requests = [(1, 150), (40, 90), (1, 33), (5, 5)]
    arguments = attention(64, 16, requests, GQA_9_3, dtype)
    together = attend(backend, 3, arguments)
    q, *cache, sinks, meta, _ = arguments
    for r, (new, length) in enumerate(requests):
        first = int(meta.qo_indptr[r])
        pages = meta.page_indices[meta.page_indptr[r] : meta.page_indptr[r + 1]].long()
        alone = Meta(
            torch.tensor([0, new], dtype=torch.int32),
            torch.tensor([0, len(pages)], dtype=torch.int32),
            torch.arange(len(pages), dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            meta.kv_head_of,
            meta.scale,
        )
        out = poison(new, *q.shape[1:])
        moved = [None if part is None else part[pages].contiguous() for part in cache]
        op_set(backend).attention(q[first : first + new], *moved, sinks, alone, out)
        assert_same_bits(out, together[first : first + new])


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.values())
def test_attention_heads_split_over_ranks(backend: str, dtype: torch.dtype) -> None:
    """5 and 4 of 9 query heads on two ranks give what one rank gives."""
    arguments = attention(64, 16, [(1, 70), (20, 50)], GQA_9_3, dtype)
    whole = attend(backend, 1, arguments)
    q, *cache, sinks, meta, _ = arguments
    for first, last, kv_heads in [(0, 5, slice(0, 2)), (5, 9, slice(1, 3))]:
        heads = meta.kv_head_of[first:last] - kv_heads.start
        rank = Meta(meta.qo_indptr, meta.page_indptr, meta.page_indices, meta.kv_lens, heads, meta.scale)
        out = poison(q.shape[0], last - first, 64)
        part = [None if tensor is None else tensor[:, kv_heads].contiguous() for tensor in cache]
        op_set(backend).attention(q[:, first:last].contiguous(), *part, sinks, rank, out)
        assert_same_bits(out, whole[:, first:last].contiguous())


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.values())
def test_attention_whatever_the_size_of_pages(backend: str, page_size: int, dtype: torch.dtype) -> None:
    requests = [(1, 150), (40, 90)]
    assert_same_bits(
        attend(backend, 1, attention(33, page_size, requests, UNEVEN, dtype)),
        attend(backend, 1, attention(33, 48, requests, UNEVEN, dtype)),
    )


@pytest.mark.parametrize("dtype", [I8, U4], ids=["int8", "uint4"])
def test_appended_tokens(backend: str, dtype: torch.dtype) -> None:
    """What a token leaves in the pages does not depend on those appended with it."""
    k, v, *together, slots = append_kv(70, 3, 67, 16, dtype)
    apart = [part.clone() for part in together]
    op_set(backend, threads=3).append_kv(k, v, *together, slots)
    for i in range(70):
        one = slice(i, i + 1)
        op_set(backend).append_kv(k[one], v[one], *apart, slots[one])
    for ours, other in zip(apart, together, strict=True):
        assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8))


def test_attention_over_a_long_context(backend: str) -> None:
    """32k tokens on two threads, against plain torch."""
    length, dim, page_size = 32768, 16, 128
    count = length // page_size
    cache = [*(randn(count, 1, page_size, dim, seed=which) for which in range(2)), None, None]
    indices = torch.arange(count, dtype=torch.int32)
    starts = [torch.tensor([0, last], dtype=torch.int32) for last in (2, count)]
    lengths, heads = torch.tensor([length], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    meta = Meta(*starts, indices, lengths, heads, dim**-0.5)
    ours, right = poison(2, 2, dim), poison(2, 2, dim)
    op_set(backend, threads=2).attention(randn(2, 2, dim), *cache, None, meta, ours)
    op_set("reference").attention(randn(2, 2, dim), *cache, None, meta, right)
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
