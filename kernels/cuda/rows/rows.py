"""What launches norm.cu, silu_rows.cu and elementwise.cu; and what is refused before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""float16 and bfloat16 do not come together."""
CODES = (torch.int8, torch.float8_e4m3fn)
"""Of quantised activations."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3, torch.float16: 1}
NOTHING = 4
"""The types' numbers in elements.cuh."""
EARLY = True
"""Blocks begin while the kernel ahead ends: these kernels wait for it themselves."""
GROUP = 128
"""Elements that share a scale, where a row has several."""

_OPS = {
    "rows/norm.cu": {"plain": 0, "norm": 1, "silu": 2},
    "rows/elementwise.cu": {"plain": 0, "add": 1, "silu": 2, "gather": 3},
}
_BLOCK, _MOST_BLOCK, _MOST_UNITS = 512, 1024, 8
_STAGED_BLOCKS, _MOST_STAGED_UNITS = 2, 5
"""Of silu_rows.cu: thread blocks of a multiprocessor, and what their registers have room for."""


def check(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]) -> None:
    """Raises ValueError unless it is contiguous, of one of these dtypes and of this shape."""
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not contiguous {kinds} {shape}")


def is_whole(width: int, *tensors: Tensor | None) -> int:
    """1 where rows of so many elements can be had in accesses of 16 bytes, else 0: macro WHOLE."""
    return int(width % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in tensors))


def norm_rows(
    op: str,
    source: Tensor,
    addend: Tensor | None,
    norm: tuple[Tensor, float] | None,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """A thread block a row: see norm.cu."""
    n, width = out.shape
    if out.numel() == 0:
        return
    weight, eps = norm or (None, 0.0)
    units = -(-width // _unit(source, addend, out))
    most = _BLOCK if units <= _BLOCK * _MOST_UNITS else _MOST_BLOCK
    each = -(-units // most)
    is_grouped = scales is not None and scales.ndim == 2
    types = (
        source.dtype,
        None if addend is None else addend.dtype,
        None if weight is None else weight.dtype,
        out.dtype,
    )
    whole = is_whole(width, source, addend, weight, out)
    threads = -(-units // each // 32) * 32
    if op == "silu" and source.dtype in HALVES and whole and not is_grouped and each <= _MOST_STAGED_UNITS:
        blocks, staged_bytes = _staged(n, threads, each, out.device)
        if blocks:
            given = (source, out, scales, _strides(scales)[0], np.int32(n), np.int32(width))
            staged = _silu_kernel(source.dtype, out.dtype, each)
            launch(staged, (blocks,), threads, given, staged_bytes, is_early=EARLY)
            return
    function = _norm_kernel(op, types, each, is_grouped, most, whole)
    arguments = [addend, source, weight, np.float32(eps), out, scales, *_strides(scales), np.int32(width)]
    launch(function, (n,), threads, arguments, is_early=EARLY)


def elementwise(
    op: str,
    source: Tensor,
    out: Tensor,
    addend: Tensor | None = None,
    gather: tuple[Tensor, int] | None = None,
    scales: Tensor | None = None,
) -> None:
    """Several thread blocks a row: see elementwise.cu. With `add`, out is the source. gather: ids and the first."""
    n, width = out.shape
    if out.numel() == 0:
        return
    ids, first = gather or (None, 0)
    types = (source.dtype, None if addend is None else addend.dtype, out.dtype)
    function = _elementwise_kernel(op, types, is_whole(width, source, addend, out))
    units = -(-width // _unit(source, addend, out))
    threads = min(256, -(-units // 32) * 32)
    pieces = -(-units // threads)
    arguments = [
        source, addend, ids, np.int32(first), np.int32(len(source)), out, scales, *_strides(scales), np.int32(width),
        np.int32(pieces),
    ]  # fmt: skip
    launch(function, (n * pieces,), threads, arguments, is_early=EARLY)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Those of float32 streams up to 8,192 wide and 16 bits around them; others compile when they are first used."""
    f32, bf16, int8, e4m3, f16 = TYPES
    for addend in (None, bf16):
        yield _norm_kernel("norm", (f32, addend, f32, bf16), 1, whole=0)
        yield from (_norm_kernel("norm", (f32, addend, f32, bf16), each) for each in range(1, 5))
        for each in (1, 2):
            yield _norm_kernel("norm", (bf16, addend, bf16, bf16), each)
            for out, is_grouped in ((int8, False), (e4m3, False), (e4m3, True)):
                yield _norm_kernel("norm", (f32, addend, f32, out), each, is_grouped)
    yield _norm_kernel("plain", (bf16, None, None, e4m3), 1, whole=0)
    for op, out, each in itertools.product(("plain", "silu"), (int8, e4m3), (1, 2)):
        yield _norm_kernel(op, (bf16, None, None, out), each)
    yield from (_silu_kernel(bf16, e4m3, each) for each in (3, 4, 5))
    yield _silu_kernel(f16, e4m3, 1)  # sm_75 has no room for more
    for whole in (0, 1):
        yield _elementwise_kernel("add", (f32, bf16, f32), whole)
        yield _elementwise_kernel("silu", (bf16, None, bf16), whole)
        yield from (_elementwise_kernel("gather", (bf16, None, dtype), whole) for dtype in (f32, bf16))
    yield _elementwise_kernel("gather", (f32, None, f32), 1)
    yield from (_elementwise_kernel(op, (bf16, None, e4m3), 1) for op in ("plain", "silu"))
    yield _elementwise_kernel("add", (f32, f16, f32), 1)
    yield from (_elementwise_kernel("gather", (f16, None, dtype), 1) for dtype in (f32, f16))
    for addend, each in itertools.product((None, f16), range(1, 5)):
        yield _norm_kernel("norm", (f32, addend, f32, f16), each)
    yield from (_norm_kernel("silu", (f16, None, None, out), 1) for out in (int8, e4m3))
    yield _elementwise_kernel("silu", (f16, None, f16), 1)
    yield from (_norm_kernel("norm", (f16, addend, f16, f16), 1) for addend in (None, f16))


def _staged(n: int, threads: int, each: int, device: torch.device) -> tuple[int, int]:
    """Thread blocks of silu_rows.cu and the shared memory of one; no blocks where each would have a row at most, or a
    multiprocessor has no room for them."""
    here, num_bytes = gpu(device), threads * each * 32
    blocks, own = _STAGED_BLOCKS * here.multiprocessors, 2048  # own: bytes that a block has beside its rows
    fits = _STAGED_BLOCKS * (num_bytes + own) <= here.shared_bytes
    return blocks if fits and n > blocks else 0, num_bytes


Types = tuple[torch.dtype | None, ...]


def _norm_kernel(
    op: str, types: Types, units: int, is_grouped: bool = False, threads: int = _BLOCK, whole: int = 1
) -> Kernel:
    """types: of source, addend, weight and out."""
    source, addend, weight, out = (NOTHING if dtype is None else TYPES[dtype] for dtype in types)
    return kernel(
        "rows/norm.cu", "norm_rows", OP=_OPS["rows/norm.cu"][op], SOURCE=source, ADDEND=addend, WEIGHT=weight, OUT=out,
        GROUPED=int(is_grouped), UNITS=units, THREADS=threads, WHOLE=whole, **element_macro(*types),
    )  # fmt: skip


def _silu_kernel(source: torch.dtype, out: torch.dtype, units: int) -> Kernel:
    return kernel(
        "rows/silu_rows.cu", "silu_rows", SOURCE=TYPES[source], OUT=TYPES[out], UNITS=units, THREADS=_BLOCK, WHOLE=1,
        **element_macro(source),
    )  # fmt: skip


def _elementwise_kernel(op: str, types: Types, whole: int) -> Kernel:
    """types: of source, addend and out."""
    source, addend, out = (NOTHING if dtype is None else TYPES[dtype] for dtype in types)
    return kernel(
        "rows/elementwise.cu", "elementwise", OP=_OPS["rows/elementwise.cu"][op], SOURCE=source, ADDEND=addend, OUT=out,
        WHOLE=whole, **element_macro(*types),
    )  # fmt: skip


def _unit(*tensors: Tensor | None) -> int:
    """Elements in 16 bytes of the widest type."""
    return 4 if any(tensor is not None and tensor.dtype is torch.float32 for tensor in tensors) else 8


def _strides(scales: Tensor | None) -> tuple[np.int64, np.int64]:
    if scales is None:
        return np.int64(0), np.int64(0)
    return np.int64(scales.stride(0)), np.int64(scales.stride(1) if scales.ndim == 2 else 0)
