"""What lies between the product with q, k and v weights and attention, on a GPU: rotary_append.cu, as a whole and in
single ops. What they read and write is in ops.py.

Queries, keys and values are bfloat16 or float16; head_dim up to 256 (fastest: 64, 128, 256, all of it turning; other
multiples of 8 are not far behind); each step's outcome is rounded to it. A slot of -1 writes no page.

Pages are of their type, int8 or uint8 (4 bits) as `OpSet.append_kv` has them, or float8_e4m3fn: without scales the
elements themselves (FlashInfer's with scale 1; ±448 at most, also of an infinity), with scales a row's largest element
is ±448: zero = 0, scale = max(largest |x| / 448, 1e-12), n = x / scale to the nearest; a row with a NaN or an infinity
gets n = 0 and scale = NaN, as with int8. Strides of pages, KV heads and tokens are free, alike for keys and values.

All raise ValueError for what does not fit, BackendUnavailable without CuPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, kernel, launch
from allspan.kernels.cuda.rows.arguments import EARLY, NOTHING, TYPES, check, is_whole
from allspan.kernels.ops import HadamardRotation, HeadNorms, KvPages, Rotation

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_DIM = 256

_FORMATS = TYPES | {torch.uint8: 5}
_LANES = (4, 8, 16)
"""The lanes that turn a head of 64, 128 and 256 elements."""
_THREADS = 128
_MANY_ROWS, _EACH = 1 << 16, 4
"""With so many heads of tokens, lanes have 4 heads of one token, not 1: half as many instructions, twice the bytes on
their way. Fewer heads would leave multiprocessors without work."""
_NO_NORMS: HeadNorms[Tensor] = HeadNorms(None, None, 0.0)
_NO_HADAMARD: HadamardRotation[Tensor] = HadamardRotation(False, None)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries, keys and values; heads of a token lie one after the other. None: there are no such heads."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens, head_dim."""
        some = next(x for x in (self.q, self.k, self.v) if x is not None)
        return some.shape[0], some.shape[2]

    def check(self) -> None:
        n, dim = self.shape
        if not 1 <= dim <= MOST_DIM:
            raise ValueError(f"head_dim: {dim} is not within 1 … {MOST_DIM}")
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            if x is None:
                continue
            if x.dtype not in HALVES or x.ndim != 3 or (x.shape[0], x.shape[2]) != (n, dim):
                kinds = "bfloat16 or float16"
                raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)} is not {kinds} ({n}, heads, {dim})")
            if x.numel() and (x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != dim)):
                raise ValueError(f"{name}: strides {x.stride()}; heads of a token must lie one after the other")
        if self.k is not None and self.v is not None and self.k.shape[1] != self.v.shape[1]:
            raise ValueError(f"v: {self.v.shape[1]} heads of values for {self.k.shape[1]} of keys")


def rotary_append(
    qkv: Tensor,
    num_heads: int,
    norms: HeadNorms[Tensor],
    rotation: Rotation[Tensor],
    hadamard: HadamardRotation[Tensor],
    pages: KvPages[Tensor],
    slots: Tensor,
) -> None:
    """See `OpSet.rotary_append`."""
    kv_heads, rest = divmod(qkv.shape[1] - num_heads, 2)
    if rest or kv_heads < 1:
        raise ValueError(f"qkv: {qkv.shape[1]} heads are not {num_heads} of queries and as many values as keys")
    q, k, v = torch.split(qkv, [num_heads, kv_heads, kv_heads], 1)
    _run(_Heads(q, k, v), norms, rotation, hadamard, (pages, slots))


def head_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `OpSet.head_norm`."""
    _run(_Heads(x, None, None), HeadNorms(weight, None, eps), None, _NO_HADAMARD, None)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """See `OpSet.rotary`."""
    _run(_Heads(q, k, None), _NO_NORMS, Rotation(positions, cos_sin), _NO_HADAMARD, None)


def hadamard(x: Tensor, center: Tensor | None) -> None:
    """See `OpSet.hadamard`."""
    _run(_Heads(None, x, None), _NO_NORMS, None, HadamardRotation(True, center), None)


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    slots: Tensor,
) -> None:
    """See `OpSet.append_kv`."""
    pages = KvPages(k_cache, v_cache, k_scales, v_scales)
    _run(_Heads(None, k, v), _NO_NORMS, None, _NO_HADAMARD, (pages, slots))


def _run(
    heads: _Heads,
    norms: HeadNorms[Tensor],
    rotation: Rotation[Tensor] | None,
    hadamard: HadamardRotation[Tensor],
    append: tuple[KvPages[Tensor], Tensor] | None,
) -> None:
    heads.check()
    n, dim = heads.shape
    parts = (heads.q, heads.k, heads.v)
    counts = [0 if x is None else x.shape[1] for x in parts]
    if n * sum(counts) == 0:
        return
    positions, cos_sin, q_scales = _checked_rotation(rotation, n, dim)
    weights = norms.q_weight, norms.k_weight
    for weight in weights:
        if weight is not None:
            check("norm weight", weight, [torch.float32], (dim,))
    is_hadamard, center = hadamard
    if center is not None:
        check("center", center, [torch.float32], (counts[1], dim))
    pages, slots = append if append else ((None,) * 4, None)
    format_, strides, page_size = _checked_pages(append, n, counts[1], dim)
    lanes = next(count for count in _LANES if dim <= 16 * count)
    whole = (
        is_whole(dim, *parts, *weights, cos_sin, center, *pages[:2])
        and all(x is None or x.stride(0) % 8 == 0 for x in parts)
        and all(stride % (4 if format_ == _FORMATS[torch.uint8] else 8) == 0 for stride in strides)
    )
    rot = 0 if cos_sin is None else cos_sin.shape[1]
    arguments = [
        *parts, *(np.int64(0 if x is None else x.stride(0)) for x in parts), np.int32(n), *map(np.int32, counts),
        np.int32(dim), *weights, np.float32(norms.eps), positions, cos_sin, np.int32(rot),
        np.float32((dim & -dim) ** -0.5 if is_hadamard else 0), center, *pages, *map(np.int64, strides),
        np.int32(page_size), slots, q_scales,
    ]  # fmt: skip
    each = _EACH if whole and n * sum(counts) >= _MANY_ROWS else 1
    blocks = -(-n * sum(-(-count // each) for count in counts) * lanes // _THREADS)
    kind = element_macro(*(x.dtype for x in (*parts, pages[0]) if x is not None))
    more = (*weights, q_scales)
    is_plain = each > 1 and rot == lanes * 16 and not is_hadamard and all(one is None for one in more)
    function = _kernel(lanes, format_, int(whole), kind | {"QUERY_SCALE": int(q_scales is not None)}, each, is_plain)
    launch(function, (blocks,), _THREADS, arguments, is_early=EARLY)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for format_ in (*_FORMATS.values(), NOTHING):
        if format_ != _FORMATS[torch.float32]:
            yield _kernel(_LANES[0], format_, 0, _UNSCALED)  # no multiple of 8; larger heads compile when used
            for lanes in _LANES:
                yield _kernel(lanes, format_, 1, _UNSCALED)
            yield from (_kernel(_LANES[1], format_, 1, _UNSCALED, _EACH, plain) for plain in (False, True))
    for format_ in (_FORMATS[torch.float16], NOTHING):
        yield _kernel(_LANES[1], format_, 1, _UNSCALED | element_macro(torch.float16))
    yield _kernel(_LANES[1], _FORMATS[torch.bfloat16], 1, {"QUERY_SCALE": 1})


_UNSCALED = {"QUERY_SCALE": 0}


def _kernel(lanes: int, format_: int, whole: int, kind: dict[str, int], each: int = 1, plain: bool = False) -> Kernel:
    return kernel(
        "rows/rotary_append.cu",
        "rotary_append",
        LANES=lanes,
        FORMAT=format_,
        WHOLE=whole,
        EACH=each,
        PLAIN=int(plain),
        **kind,
    )


def _checked_rotation(
    rotation: Rotation[Tensor] | None, n: int, dim: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if rotation is None:
        return None, None, None
    positions, cos_sin, q_scales = rotation
    check("positions", positions, [torch.int32], (n,))
    rot = cos_sin.shape[1]
    check("cos_sin", cos_sin, [torch.float32], (len(cos_sin), rot))
    if rot % 2 or rot > dim:
        raise ValueError(f"cos_sin: {rot} elements that turn are not an even number up to head_dim {dim}")
    if q_scales is not None:
        check("q_scales", q_scales, [torch.float32], (len(cos_sin),))
    return positions, cos_sin, q_scales


def _checked_pages(
    append: tuple[KvPages[Tensor], Tensor] | None, n: int, kv_heads: int, dim: int
) -> tuple[int, tuple[int, ...], int]:
    """Macro FORMAT, strides of pages, heads and tokens, page size."""
    if append is None:
        return NOTHING, (0, 0, 0), 1
    (k_cache, v_cache, k_scales, v_scales), slots = append
    check("slots", slots, [torch.int32], (n,))
    count, _, page_size, _ = k_cache.shape
    width = -(-dim // 2) if k_cache.dtype is torch.uint8 else dim
    if k_cache.dtype not in _FORMATS or k_cache.dtype is torch.float32:
        raise ValueError(f"k_cache: {k_cache.dtype} is not bfloat16, float16, int8, uint8 or float8_e4m3fn")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape != (count, kv_heads, page_size, width) or cache.stride(3) != 1:
            raise ValueError(f"{name}: {tuple(cache.shape)} is not ({count}, {kv_heads}, {page_size}, {width})")
        if cache.dtype is not k_cache.dtype or cache.stride() != k_cache.stride():
            raise ValueError(f"{name}: {cache.dtype} with strides {cache.stride()} differs from k_cache")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (scales is None) != (k_scales is None) or (scales is None) != _may_lack_scales(k_cache.dtype, scales):
            raise ValueError(f"{name}: pages of {k_cache.dtype} have {'no ' if scales is not None else ''}scales")
        if scales is not None:
            check(name, scales, [torch.float32], (count, kv_heads, 2, page_size))
    return _FORMATS[k_cache.dtype], k_cache.stride()[:3], page_size


def _may_lack_scales(dtype: torch.dtype, scales: Tensor | None) -> bool:
    """Whether pages of this dtype have none; fp8 ones as they come."""
    return scales is None if dtype is torch.float8_e4m3fn else dtype in HALVES
