"""Inputs for the ops, odd shapes included: one table, used for every backend and instruction set.

Outputs are filled with NaN, and cache tokens that nobody wrote too, so that reading or leaving them shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.ops import ACTIVATIONS
from support import kernel_oracle

NAN = float("nan")


@dataclass
class Meta:
    """An AttentionMeta."""

    qo_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    kv_lens: Tensor
    kv_head_of: Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    slopes: Tensor | None = None


@dataclass(frozen=True)
class Scoring:
    """What a case of attention has beside the scale."""

    window: int = 0
    soft_cap: float = 0.0
    has_slopes: bool = False
    has_sinks: bool = False

    def __str__(self) -> str:
        return "-".join(f"{name}-{value}" if value is not True else name for name, value in vars(self).items() if value)


PLAIN = Scoring()


@dataclass(frozen=True)
class Case:
    """One call of an op with the arguments that `make(*sizes)` gives, the same each time."""

    op: str
    name: str
    make: Callable[..., list[Any]]
    sizes: tuple[Any, ...] = ()
    tolerance: float = 2e-5

    def tolerance_on(self, backend: str) -> float:
        """Pages of less than float32 are multiplied with queries and weights in bfloat16 where the machine does."""
        if self.op == "attention" and backend in ("cpu/avx512_bf16", "cpu/amx") and F32 not in self.sizes:
            return 1e-2
        return self.tolerance

    def build(self) -> list[Any]:
        return self.make(*self.sizes)

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poison(*shape: int) -> Tensor:
    return torch.full(shape, NAN)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def linear(n: int, k: int, columns: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> list[Any]:
    weight = randn(columns, k, dtype=dtype, seed=1) / max(1, k) ** 0.5
    return [randn(n, k), weight, randn(columns, seed=2) if bias else None, poison(n, columns)]


def hadamard(n: int, heads: int, dim: int, has_center: bool) -> list[Any]:
    return [randn(n, heads, dim), randn(heads, dim, seed=1) * 9 if has_center else None]


def pages(count: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype) -> list[Any]:
    """[k_cache, v_cache, k_scales, v_scales] that nobody has written: NaN where a NaN can be."""
    if dtype.is_floating_point:
        return [*(torch.full((count, kv_heads, page_size, dim), NAN, dtype=dtype) for _ in range(2)), None, None]
    width = dim if dtype is I8 else (dim + 1) // 2
    caches = [torch.full((count, kv_heads, page_size, width), 85, dtype=dtype) for _ in range(2)]
    return [*caches, *(poison(count, kv_heads, 2, page_size) for _ in range(2))]


def attention(
    dim: int,
    page_size: int,
    requests: list[tuple[int, int]],
    kv_head_of: list[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    more_heads: int = 0,
    scoring: Scoring = PLAIN,
) -> list[Any]:
    """requests: (new tokens, tokens in the cache). Pages are handed out in a shuffled order; nobody has written those
    that no query of the window sees.

    q has `more_heads` that nobody reads.
    """
    kv_heads, window = max(kv_head_of) + 1, scoring.window
    counts = [math.ceil(length / page_size) for _, length in requests]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    page_indptr = [sum(counts[:r]) for r in range(len(counts) + 1)]
    cache = pages(len(order), kv_heads, page_size, dim, dtype)
    for request, (new, length) in enumerate(requests):
        own = torch.tensor(order[page_indptr[request] : page_indptr[request + 1]], dtype=torch.int32)
        tokens = torch.arange(length, dtype=torch.int32)
        slots = own[tokens // page_size] * page_size + tokens % page_size
        rows = [
            torch.stack([randn(kv_heads, dim, seed=7 * token + 1000 * request + which) for token in range(length)])
            for which in range(2 if length else 0)
        ]
        if rows:
            first = max(0, length - new + 1 - window) // page_size * page_size if window else 0
            append_to(cache, [each[first:] for each in rows], slots[first:])
    starts = [sum(new for new, _ in requests[:r]) for r in range(len(requests) + 1)]
    meta = Meta(
        ints(starts),
        ints(page_indptr),
        ints(order[: page_indptr[-1]]),
        ints([length for _, length in requests]),
        ints(kv_head_of),
        dim**-0.5,
        window,
        scoring.soft_cap,
        0.8 ** torch.arange(1.0, len(kv_head_of) + 1) if scoring.has_slopes else None,
    )
    sinks = randn(len(kv_head_of), seed=6) * 3 if scoring.has_sinks else None
    q = torch.full((starts[-1], len(kv_head_of) + more_heads, dim), NAN)
    q[:, : len(kv_head_of)] = randn(starts[-1], len(kv_head_of), dim, seed=5) * 2
    return [q, *cache, sinks, meta, poison(starts[-1], len(kv_head_of), dim)]


def append_to(cache: list[Any], rows: list[Tensor], slots: Tensor) -> None:
    """Writes keys and values with the oracle's numbers."""
    kernel_oracle.append_kv(rows[0].double(), rows[1].double(), *cache, slots)


def rotary(n: int, heads: int, kv_heads: int, dim: int, rot: int) -> list[Any]:
    angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(0, rot, 2) / rot)
    positions = ints([(37 * i + 5) % 512 for i in range(n)])
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return [randn(n, heads, dim), randn(n, kv_heads, dim, seed=1), positions, cos_sin]


def append_kv(n: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype) -> list[Any]:
    count = n // page_size + 2
    slots = torch.randperm(count * page_size, generator=torch.Generator().manual_seed(0))[:n].to(torch.int32)
    return [
        randn(n, kv_heads, dim),
        randn(n, kv_heads, dim, seed=1),
        *pages(count, kv_heads, page_size, dim, dtype),
        slots,
    ]


def rms_norm(n: int, width: int) -> list[Any]:
    return [randn(n, width), randn(width, seed=1), 1e-5, poison(n, width)]


def add_rms_norm(n: int, width: int) -> list[Any]:
    return [randn(n, width), randn(n, width, seed=2), randn(width, seed=1), 1e-6, poison(n, width)]


def add(n: int, width: int) -> list[Any]:
    return [randn(n, width), randn(n, width, seed=2)]


def layer_norm(n: int, width: int) -> list[Any]:
    return [randn(n, width) + 3, randn(width, seed=1), 1e-5, poison(n, width)]


def gated_mul(n: int, width: int, activation: str) -> list[Any]:
    return [randn(n, 2 * width) * 8, activation, poison(n, width)]


def gated_mul_far_out(activation: str) -> list[Any]:
    return [torch.tensor([[-200.0, 200.0, -88.0, 88.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]]), activation, poison(1, 5)]


def soft_cap(n: int, width: int, cap: float) -> list[Any]:
    """Numbers far below the cap, near it and far above it."""
    return [randn(n, width) * cap * 10.0 ** (torch.arange(width) % 7 - 4), cap]


def head_norm(n: int, heads: int, dim: int) -> list[Any]:
    return [randn(n, heads, dim), randn(dim, seed=1), 1e-6]


def mean_squares(n: int, heads: int, dim: int) -> list[Any]:
    return [randn(n, heads, dim), randn(2, heads, seed=1).abs(), poison(n, 2)]


def norm_heads(n: int, q: int, k: int, dim: int) -> list[Any]:
    return [randn(n, q + 2 * k, dim), randn(n, 2, seed=1).abs(), randn(q * dim, seed=2), randn(k * dim, seed=3), 1e-6]


def embedding(ids: list[int], rows: int, first_row: int, dtype: torch.dtype) -> list[Any]:
    return [ints(ids), randn(rows, 33, dtype=dtype), first_row, poison(len(ids), 33)]


def put_rows(places: list[int] | None) -> list[Any]:
    x, rows = (None, None) if places is None else (randn(len(places), 33), torch.tensor(places))
    return [x, rows, 1.5, randn(7, 33, seed=1)]


def gather_rows(rows: list[int]) -> list[Any]:
    return [randn(70, 33), ints(rows), poison(len(rows), 33)]


def put_columns(n: int, columns: int, first: int) -> list[Any]:
    return [randn(n, columns), first, randn(n, 33, seed=1)]


def gather_columns(n: int, columns: list[int]) -> list[Any]:
    return [randn(n, 33), ints(columns), poison(n, len(columns))]


F32, BF16, I8, U4 = torch.float32, torch.bfloat16, torch.int8, torch.uint8
"""Formats of pages; U4 holds two elements a byte."""
GQA_9_3 = [0, 0, 0, 1, 1, 1, 2, 2, 2]
UNEVEN = [0, 0, 0, 1, 1]
ODD_MAP = [1, 0, 1, 2, 0]

LINEAR = [
    (1, 576, 1536),
    (1, 1, 1),
    (1, 17, 5),
    (2, 33, 7),
    (3, 64, 4),
    (5, 100, 131),
    (7, 576, 49),
    (31, 250, 66),
    (97, 48, 260),
    (128, 576, 192),
    (257, 31, 33),
    (200, 0, 3),
    (0, 8, 8),
    (4, 8, 0),
]

ATTENTION: list[tuple[str, int, int, list[tuple[int, int]], list[int], torch.dtype]] = [
    ("decode-one", 64, 16, [(1, 1)], [0], F32),
    ("decode-batch", 64, 16, [(1, 5), (1, 64), (1, 65), (1, 200)], GQA_9_3, F32),
    ("decode-bf16", 128, 32, [(1, 130), (1, 3)], UNEVEN, BF16),
    ("prefill", 64, 32, [(100, 100)], UNEVEN, F32),
    ("chunk", 64, 64, [(70, 150)], ODD_MAP, F32),
    ("mixed", 80, 16, [(1, 90), (33, 33), (0, 12), (17, 100), (1, 17)], GQA_9_3, F32),
    ("mixed-bf16", 64, 128, [(1, 190), (33, 33), (17, 100)], UNEVEN, BF16),
    ("splits", 64, 16, [(1, 700), (30, 530), (1, 256), (2, 257), (1, 3)], GQA_9_3, F32),
    ("splits-bf16", 64, 16, [(1, 700), (30, 530), (1, 256), (2, 257), (1, 3)], GQA_9_3, BF16),
    ("splits-int8", 48, 128, [(1, 600), (5, 300)], UNEVEN, I8),
    ("head-33-bf16", 33, 24, [(9, 70), (1, 20)], [0, 0], BF16),
    ("head-48", 48, 48, [(3, 70), (20, 20)], [0, 1], F32),
    ("head-80-bf16", 80, 16, [(9, 70)], [0, 0], BF16),
    ("head-128", 128, 16, [(5, 129)], [0, 1, 1], F32),
    ("head-256", 256, 32, [(13, 66)], [0, 0, 0, 0], F32),
    ("head-20", 20, 24, [(7, 30)], [0, 0], F32),
    ("many-heads", 16, 16, [(3, 40)], [0] * 70, F32),
    ("an-idle-kv-head", 32, 16, [(3, 40)], [2, 2, 0], F32),
    ("no-requests", 64, 16, [], [0], F32),
    ("mixed-int8", 64, 16, [(1, 90), (33, 33), (0, 12), (17, 100), (1, 17)], GQA_9_3, I8),
    ("mixed-uint4", 64, 32, [(1, 90), (33, 33), (0, 12), (17, 100), (1, 17)], GQA_9_3, U4),
    ("decode-int8", 80, 128, [(1, 5), (1, 64), (1, 65), (1, 130)], UNEVEN, I8),
    ("decode-uint4", 80, 64, [(1, 5), (1, 64), (1, 65), (1, 130)], UNEVEN, U4),
    ("head-33-int8", 33, 16, [(9, 70), (1, 20)], [0, 0], I8),
    ("head-33-uint4", 33, 16, [(9, 70), (1, 20)], [0, 0], U4),
    ("head-19-uint4", 19, 16, [(2, 20)], [0, 1], U4),
    ("head-1-uint4", 1, 16, [(2, 20)], [0, 1], U4),
    ("head-256-int8", 256, 16, [(13, 66)], [0, 0, 0, 0], I8),
    ("head-128-uint4", 128, 32, [(5, 129)], [0, 1, 1], U4),
]


def _size_name(sizes: tuple[Any, ...]) -> str:
    return "x".join(str(size).removeprefix("torch.") for size in sizes)


def _sized(op: str, make: Callable[..., list[Any]], table: list[Any], tolerance: float = 2e-5) -> Iterator[Case]:
    for sizes in table:
        yield Case(op, _size_name(sizes), make, sizes, tolerance)


def _cases() -> Iterator[Case]:
    rows = [(1, 576), (3, 1), (7, 33), (130, 160), (257, 48), (0, 16)]
    yield from _sized("rms_norm", rms_norm, rows)
    yield from _sized("add_rms_norm", add_rms_norm, rows)
    yield from _sized("add", add, rows, 1e-6)
    yield from _sized("layer_norm", layer_norm, [size for size in rows if size[1] > 1])
    for activation in ACTIVATIONS:
        yield from _sized("gated_mul", gated_mul, [(*size, activation) for size in rows])
        yield Case("gated_mul", f"far-out-{activation}", gated_mul_far_out, (activation,))
    yield from _sized("soft_cap", soft_cap, [(1, 576, 30.0), (7, 33, 50.0), (130, 160, 0.5), (0, 16, 30.0)], 1e-6)
    yield from _sized("head_norm", head_norm, [(1, 9, 64), (19, 3, 80), (65, 2, 48), (5, 1, 256), (0, 2, 8)])
    yield from _sized("mean_squares", mean_squares, [(1, 9, 64), (19, 3, 33), (0, 2, 8)])
    yield from _sized("norm_heads", norm_heads, [(1, 6, 2, 64), (19, 3, 1, 33), (0, 2, 1, 8)])
    turns = [(1, 9, 3, 64, 64), (33, 5, 2, 80, 80), (7, 2, 1, 128, 32), (40, 3, 3, 48, 10), (0, 2, 2, 8, 8)]
    yield from _sized("rotary", rotary, turns)
    for has_center in (False, True):
        heads = [(dim % 5 + 1, dim % 3 + 1, dim, has_center) for dim in (1, 2, 4, 12, 16, 20, 24, 33, 64, 80, 96, 256)]
        yield from _sized("hadamard", hadamard, heads)
    for dtype, tolerance in [(F32, 0.0), (BF16, 2.0**-8), (I8, 1e-6), (U4, 1e-6)]:
        sizes = [(1, 3, 64, 16, dtype), (70, 2, 80, 48, dtype), (5, 1, 33, 128, dtype), (0, 1, 8, 16, dtype)]
        yield from _sized("append_kv", append_kv, sizes, tolerance)
    for dtype in (F32, BF16):
        yield Case("embedding", f"of-a-rank-{dtype}", embedding, ([0, 40, 41, 99, 100, 7, 57], 59, 41, dtype), 0)
    yield Case("embedding", "of-nothing", embedding, ([], 3, 0, F32), 0)
    yield Case("embedding", "of-a-rank-without-rows", embedding, ([1, 2], 0, 0, F32), 0)
    yield Case("gather_rows", "some", gather_rows, ([69, 0, 0, 31],), 0)
    yield Case("gather_rows", "none", gather_rows, ([],), 0)
    for name, places in (("some", [3, 0, 6]), ("none", None)):
        yield Case("put_rows", name, put_rows, (places,), 1e-6)
    yield Case("gather_columns", "some", gather_columns, (5, [32, 0, 0, 31]), 0)
    yield Case("gather_columns", "of-nothing", gather_columns, (0, [2, 1]), 0)
    yield Case("put_columns", "the-last", put_columns, (5, 11, 22), 0)
    yield Case("put_columns", "all", put_columns, (3, 33, 0), 0)
    yield Case("put_columns", "of-nothing", put_columns, (0, 4, 0), 0)
    for dtype in (F32, BF16):
        for bias in (False, True):
            yield from _sized("linear", linear, [(*sizes, dtype, bias) for sizes in LINEAR])
    for name, *sizes in ATTENTION:
        yield Case("attention", name, attention, tuple(sizes))
    for dtype in (F32, BF16, I8):
        fused = (64, 16, [(1, 40), (5, 20)], UNEVEN, dtype, 0, 4)
        yield Case("attention", f"front-of-fused-{dtype}", attention, fused)
    yield from _windows()
    yield from _features()


def _windows() -> Iterator[Case]:
    requests = [(1, 300), (40, 340), (1, 90), (0, 12)]
    for dtype in (F32, BF16, I8, U4):
        for window in (1, 270) if dtype is F32 else (30,):
            sizes = (64, 16, requests, UNEVEN, dtype, 0, 0, Scoring(window))
            yield Case("attention", f"window-{window}-{dtype}", attention, sizes)


ALL_AT_ONCE = Scoring(0, 3.0, True, True)
SCORINGS = [
    Scoring(soft_cap=3.0),
    Scoring(has_slopes=True),
    Scoring(has_sinks=True),
    ALL_AT_ONCE,
    Scoring(300, 3.0, True, True),
]
LENGTHS = [(1, 1), (2, 15), (1, 16), (17, 17), (1, 511), (30, 512), (1, 513)]


def _features() -> Iterator[Case]:
    """Caps, slopes and sinks, alone and together, with windows that cross blocks and splits."""
    for dtype in (F32, BF16, I8, U4):
        for scoring in SCORINGS:
            sizes = (48, 16, LENGTHS, UNEVEN, dtype, 0, 0, scoring)
            yield Case("attention", f"{scoring}-{dtype}", attention, sizes)
    for dtype in (F32, BF16):
        sizes = (32, 64, [(1, 2743), (3, 2743)], [0] * 4, dtype, 0, 0, ALL_AT_ONCE)
        yield Case("attention", f"long-{dtype}", attention, sizes)


CASES: tuple[Case, ...] = tuple(_cases())


def to_float64(argument: Any) -> Any:
    """The same argument for the oracle."""
    if isinstance(argument, Tensor):
        return argument.double() if argument.is_floating_point() else argument.clone()
    return argument


def on_device(argument: Any, device: str) -> Any:
    """The same argument, its tensors on `device`."""
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, Meta):
        return Meta(*(on_device(value, device) for value in vars(argument).values()))
    return argument
