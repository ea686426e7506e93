"""Products with packed weights in rows (`allspan.kernels.rows`), for bfloat16 models: see `allspan.kernels.ops.OpSet`.

x is bfloat16 [n, K]; out is bfloat16, or float32 (logits, and what `packed_linear_add` adds to). Sums are float32.

- Few rows: a kernel that reads the weight once, at the speed of memory; codes meet x as it is, whatever the spec's
  activation: at these sizes rounding x would save nothing.
- Many: cuBLAS, through torch. Codes become bfloat16 first; but with scales a channel and activation a8 or e4m3, x
  becomes int8 or e4m3 (sm_89 and later), with a scale a row, and codes are multiplied as they are.

So a row's bits depend on how many come with it, unlike on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.cuda.modules import Kernel, gpu, kernel, launch
from allspan.kernels.packed import PackedSpec
from allspan.kernels.rows import codes_of, numbers_of

FEW_ROWS = {16: 32, 8: 64, 4: 64}
"""By the bits of a code, the most rows that are not left to cuBLAS, which would need codes as bfloat16 first."""

_STORE, _ADD, _GATED = 0, 1, 2
_ELEMENTWISE_BLOCKS = 16
"""Of a multiprocessor, for kernels that go through a tensor once."""


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor) -> None:
    """See `OpSet.packed_linear`. Raises ValueError for what the kernels would read or write past."""
    _product(x, weight, bias, spec, _Into(out, column, _STORE))


def packed_linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
) -> None:
    """See `OpSet.packed_linear_add`; out is float32."""
    _product(x, weight, bias, spec, _Into(out, column, _ADD))


def packed_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
) -> None:
    """See `OpSet.packed_gated_linear`."""
    _product(x, weight, bias, spec, _Into(out, column, _GATED))


def packed_embedding(ids: Tensor, weight: Tensor, spec: PackedSpec, first_row: int, out: Tensor) -> None:
    """See `OpSet.packed_embedding`; out is float32 or bfloat16."""
    _check_weight(weight, spec)
    if ids.dtype != torch.int32 or out.shape != (len(ids), spec.inputs) or not out.is_contiguous():
        raise ValueError(f"out: {list(out.shape)} is not {spec.inputs} of each of {len(ids)} ids ({ids.dtype})")
    if len(ids) == 0 or spec.inputs == 0:
        return
    sizes = (*_groups(spec), spec.inputs, _slabs(spec), spec.lead, first_row, _is_float(out))
    arguments = (ids, weight, numbers_of(weight, spec), out, np.int32(spec.features), *map(np.int32, sizes))
    launch(_codes("embed", spec), (len(ids),), 128, arguments)


@dataclass(frozen=True, slots=True)
class _Into:
    """Where a product goes, and what becomes of it there."""

    out: Tensor
    column: int
    epilogue: int

    def width(self, spec: PackedSpec) -> int:
        return spec.parts[0] if self.epilogue == _GATED else spec.features

    def view(self, spec: PackedSpec) -> Tensor:
        return self.out[:, self.column : self.column + self.width(spec)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: _Into) -> None:
    _check(x, weight, bias, spec, into)
    if len(x) == 0 or spec.features == 0:
        return
    bits = spec.kind.bits
    if len(x) <= FEW_ROWS[bits] or spec.inputs == 0:
        _few(_aligned(x, spec), weight, bias, spec, into)
    elif spec.activation == "a8" and spec.format == "channel8" and spec.features % 8 == 0:
        _of_codes(_aligned(x, spec), weight, bias, spec, into)
    elif spec.activation == "e4m3" and spec.features % 16 == 0 and gpu(x.device).capability >= (8, 9):
        _of_e4m3(_aligned(x, spec), weight, bias, spec, into)
    else:
        matrix = codes_of(weight, spec) if bits == 16 else _dequantised(weight, spec)
        _of_floats(x, matrix[:, spec.lead : spec.lead + spec.inputs], bias, spec, into)


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: _Into) -> None:
    rows, width, multiprocessors = len(x), into.width(spec), gpu(x.device).multiprocessors
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    is_wide = into.epilogue == _GATED or width >= 64 * multiprocessors
    blocks = -(-width // (32 if is_wide and into.epilogue != _GATED else 16)) * -(-rows // (8 * tiles))
    skinny, warps, warp_bytes = _skinny(_bits(spec), _group_sets(spec), tiles, is_wide)
    sizes = (rows, spec.features, x.shape[1], _slabs(spec), _groups(spec)[1], into.epilogue, _is_float(into.out))
    strides = (x.stride(0), into.out.stride(0), into.column)
    arguments = (weight, numbers_of(weight, spec), x, bias, into.out, *map(np.int32, (*sizes, *strides)))
    launch(skinny, (blocks,), warps * 32, arguments, warps * warp_bytes, is_early=True)


def _skinny(bits: Mapping[str, int], group_sets: int, tiles: int, is_wide: bool) -> tuple[Kernel, int, int]:
    """And its warps, and the bytes of shared memory of one: its stages, or later its sums."""
    parts, warps, stages = (2, 4, 4) if is_wide else (1, 8, 8)
    if bits["BITS"] == 4 and tiles == 1 and not is_wide:
        warps, stages = 16, 4  # there is more to do for each byte
    sets = 16 // bits["BITS"]
    group_sets = min(group_sets, sets)
    numbers = sets // group_sets * parts * 16 if group_sets else 0
    floats = parts * tiles * 8 * 20 + tiles * 8
    macros = {"GROUP_SETS": group_sets, "TILES": tiles, "PARTS": parts, "WARPS": warps, "STAGES": stages}
    skinny = kernel("skinny.cu", "skinny", **bits, **macros)
    return skinny, warps, max(stages * (parts * 1024 + numbers * 4), floats * 4)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    groups = {
        "bf16": (0,),
        "fp8": (0,),
        "channel8": (0,),
        "channel4": (0,),
        "group8": (32, 64),
        "group4": (32, 64, 128),
    }
    for name, sizes in groups.items():
        specs = [PackedSpec(name, "", (), 0, group=group, memory="rows") for group in sizes]
        for spec, tiles, is_wide in itertools.product(specs, (1, 2, 4), (False, True)):
            yield _skinny(_bits(spec), _group_sets(spec), tiles, is_wide)[0]
        yield from (_codes(function, specs[0]) for function in ("embed", "dequantise"))
    yield from (_quantise_kernel(floats) for floats in (0, 1))
    yield from (_finish_kernel(is_of_codes, width) for is_of_codes in (False, True) for width in (1, 8))


def _of_floats(x: Tensor, matrix: Tensor, bias: Tensor | None, spec: PackedSpec, into: _Into) -> None:
    """`matrix` bfloat16 [features, inputs]."""
    view = into.view(spec)
    if bias is not None or into.epilogue == _GATED:
        _finish(torch.mm(x, matrix.T), bias, spec, into)
    elif not _is_float(into.out):
        torch.mm(x, matrix.T, out=view)
    elif x.is_cuda:
        if into.epilogue == _ADD:
            torch.addmm(view, x, matrix.T, out_dtype=torch.float32, out=view)
        else:
            torch.mm(x, matrix.T, out_dtype=torch.float32, out=view)
    else:
        product = x.float() @ matrix.float().T
        view.copy_(product + view if into.epilogue == _ADD else product)


def _of_codes(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: _Into) -> None:
    """Whole numbers of 8 bits on both sides; both in a slab's order."""
    codes, scales, sums = _quantised(x, spec, torch.int8)
    products = torch._int_mm(codes, codes_of(weight, spec).view(torch.int8).T)
    _finish(products, bias, spec, into, (scales, sums, numbers_of(weight, spec)))


def _of_e4m3(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: _Into) -> None:
    """e4m3 numbers on both sides, in a slab's order."""
    codes, scales, _ = _quantised(x, spec, torch.float8_e4m3fn)
    matrix, numbers = codes_of(weight, spec).view(torch.float8_e4m3fn).T, numbers_of(weight, spec)[0, :, 0]
    if x.is_cuda:
        factors = scales.view(-1, 1), numbers.contiguous().view(1, -1)
        products = torch._scaled_mm(codes, matrix, *factors, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        products = (codes.float() @ matrix.float() * scales.view(-1, 1) * numbers).bfloat16()
    _finish(products, bias, spec, into)


def _quantised(x: Tensor, spec: PackedSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, depth] in a slab's order, their scales [n], and the sums of codes [n] if they are whole numbers."""
    codes = torch.empty(len(x), spec.depth, dtype=dtype, device=x.device)
    scales, sums = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    sizes = np.int32(x.shape[1]), np.int32(_slabs(spec))
    launch(_quantise_kernel(int(spec.kind.is_e4m3)), (len(x),), 256, (x, codes, scales, sums, *sizes))
    return codes, scales, sums


def _quantise_kernel(floats: int) -> Kernel:
    return kernel("codes.cu", "quantise", BITS=8, FLOATS=floats)


def _dequantised(weight: Tensor, spec: PackedSpec) -> Tensor:
    """bfloat16 [features, depth], for this call alone."""
    out = torch.empty(spec.features, spec.depth, dtype=torch.bfloat16, device=weight.device)
    sizes = map(np.int32, (spec.features, *_groups(spec), _slabs(spec)))
    blocks = _blocks(spec.features * _slabs(spec) * 4, weight)
    launch(_codes("dequantise", spec), (blocks,), 256, (weight, numbers_of(weight, spec), out, *sizes))
    return out


def _finish(
    products: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    into: _Into,
    factors: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> None:
    """`products` [n, features], bfloat16 or of codes, which take the `factors`: scales and sums of x, and numbers."""
    width, stride = into.width(spec), into.out.stride(0)
    together = 8 if width % 8 == into.column % 8 == stride % 8 == 0 else 1
    finish = _finish_kernel(products.dtype == torch.int32, together)
    sizes = (len(products), spec.features, into.epilogue, _is_float(into.out), stride, into.column)
    blocks = _blocks(len(products) * width // together, products)
    launch(finish, (blocks,), 256, (products, *factors, bias, into.out, *map(np.int32, sizes)))


def _finish_kernel(is_of_codes: bool, width: int) -> Kernel:
    return kernel("codes.cu", "finish", BITS=8 if is_of_codes else 16, FROM_CODES=int(is_of_codes), WIDTH=width)


def _codes(name: str, spec: PackedSpec) -> Kernel:
    return kernel("codes.cu", name, **_bits(spec), GROUPED=int(_group_sets(spec) > 0))


def _bits(spec: PackedSpec) -> dict[str, int]:
    return {"BITS": spec.kind.bits, "FLOATS": int(spec.kind.is_e4m3)}


def _group_sets(spec: PackedSpec) -> int:
    """Sets of 32 inputs that share numbers, 0 where all do."""
    return spec.block // 32 if spec.kind.scale_bytes else 0


def _groups(spec: PackedSpec) -> tuple[int, int]:
    """How many there are, and their sets."""
    return spec.groups, max(1, _group_sets(spec))


def _slabs(spec: PackedSpec) -> int:
    return spec.depth * spec.kind.bits // 512


def _blocks(threads: int, tensor: Tensor) -> int:
    """Of 256 threads, which go on from where they are."""
    return max(1, min(-(-threads // 256), _ELEMENTWISE_BLOCKS * gpu(tensor.device).multiprocessors))


def _is_float(out: Tensor) -> int:
    return int(out.dtype == torch.float32)


def _aligned(x: Tensor, spec: PackedSpec) -> Tensor:
    """x with the lead before it, in rows of whole 16 bytes."""
    if spec.lead or spec.inputs % 8 or x.data_ptr() % 16:
        return functional.pad(x, (spec.lead, -(spec.lead + spec.inputs) % 8))
    return x


def _check_weight(weight: Tensor, spec: PackedSpec) -> None:
    if weight.dtype != torch.uint8 or tuple(weight.shape) != spec.shape or not weight.is_contiguous():
        raise ValueError(f"weight: {weight.dtype} {list(weight.shape)} is not what {spec} says")
    if spec.memory != "rows":
        raise ValueError(f"weight: lies in {spec.memory}, the kernels of a GPU take rows")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: _Into) -> None:
    _check_weight(weight, spec)
    if x.dtype != torch.bfloat16 or x.shape[1:] != (spec.inputs,) or not x.is_contiguous():
        raise ValueError(f"x: {x.dtype} {list(x.shape)} is not bfloat16 [n, {spec.inputs}]")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (spec.features,)):
        raise ValueError(f"bias: {bias.dtype} {list(bias.shape)} is not float32 [{spec.features}]")
    if into.epilogue == _GATED and (len(spec.parts) != 2 or spec.parts[0] != spec.parts[1]):
        raise ValueError(f"weight: parts {spec.parts} are not two of one size")
    out, most = into.out, into.column + into.width(spec)
    dtypes = (torch.float32,) if into.epilogue == _ADD else (torch.float32, torch.bfloat16)
    if out.dtype not in dtypes or out.ndim != 2 or len(out) != len(x) or out.shape[1] < most or out.stride(1) != 1:
        raise ValueError(f"out: {out.dtype} {list(out.shape)} does not take {len(x)} rows of {most}")
