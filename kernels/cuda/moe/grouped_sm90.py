"""Products of many rows with weights of experts, on Hopper: see grouped_sm90.cu.

Weights of 16 bits are multiplied as they are; those of fp8 and fp8_block, too, and x becomes e4m3, with a scale a row
or for each 128 inputs. Others are read packed and become x's type within the kernel; those that are too shallow for it
or meet very many rows are dequantised before, some experts at a time. Sums are float32, those of e4m3 as the tensor
cores have them, but from block to block.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch, tensor_map
from allspan.kernels.cuda.linear.call import is_float
from allspan.kernels.cuda.linear.dequantise import dequantised
from allspan.kernels.cuda.linear.macros import bits_macros, common_specs, group_sets, k_tiles
from allspan.kernels.cuda.linear.quantise_input import quantise_blocks, quantise_rows
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import K_TILE_BYTES, PackedSpec
from allspan.kernels.row_layout import FLOATS

CAPABILITY = (9, 0)

LEAST_SLOTS, LEAST_SLOTS_BLOCKS, LEAST_SLOTS_PACKED, LEAST_SLOTS_DEQUANTISED = 4, 8, 16, 48
"""Slots a place from which on this is faster than the kernel that streams weights; those that are dequantised are read,
written and read again. µs of both products on one H200, 128 places of 768 columns with 2,048 inputs, streaming against
this: bfloat16 with 2 slots a place 263 against 275, with 4 304 against 305; fp8 with 2 155 against 165, with 4 194
against 176; fp8_block with 4 214 against 217; uint4 with 8 357 against 353, with 16 375 against
355 (128 places of 2,880 in mxfp4 1,807 against 1,914), with 32 559 against 359; dequantised before with 32 819."""

MOST_SLOTS_PACKED = 384
"""Slots a place up to which decoding within the kernel, again for every 128 slots, is faster than once before. µs as
above, decoded within and before: with 64 uint4 398 and 851, int8 467 and 849; with 512 1,687 and 1,600, 1,997 and
1,610; mxfp4 with 256 5,104 and 5,643."""

_ROWS, _KEPT, _THREADS = 128, 4, 384
_MOST_PLACES = 512
_MOST_SCRATCH = 1 << 29
"""Bytes of dequantised weights at a time."""
_PRODUCT = struct.Struct("=2q14i")


@dataclass(frozen=True, slots=True)
class Grouped:
    """x [rows, inputs], or of `has_own_rows` [slots, inputs]; weight uint8 [places, *spec.shape]; out [slots, outputs]
    in rows of slots, of x's type or float32. Tensors are as product.py has checked them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    spec: PackedSpec
    routing: Routing[Tensor]
    out: Tensor
    activation: int | None = None
    """A gated product's: GATED_SILU …"""
    has_own_rows: bool = False

    @property
    def slots(self) -> int:
        return self.routing.places.numel()


def takes(call: Grouped) -> bool:
    """Whether `multiply` is faster than the kernel that streams weights, and takes these tensors."""
    return pays(call.routing.slots.view(-1), call.weight, call.spec) and fits(call)


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a thread block multiplies at once."""

    features: int
    stages: int
    scales: int = 0
    """Bytes beside a step's tiles."""
    held: int = 0
    """Packed k tiles."""
    words: int = 0
    """The number of 32-bit words of qparams that a feature has in each of those."""

    def shared_bytes(self, places: int) -> int:
        steps = self.stages * ((_ROWS + self.features) * 128 + self.scales)
        packed = self.held * self.features * (64 + 4 * self.words)
        barriers = -(-(2 * self.stages + self.held) * 8 // 16) * 16
        notes = _KEPT * (16 + _ROWS * 8 + self.features * 8 + 4)
        return 1024 - 128 + steps + packed + barriers + 8 * 2048 + notes + 8 * (places + 1)


_WHOLE, _BLOCKS = _Tile(256, 4), _Tile(128, 6, 1024)


def _has_blocks(spec: PackedSpec) -> bool:
    """Whether scales of 128 inputs meet x's."""
    return spec.format == "fp8_block" and spec.k_offset == 0 and spec.depth % spec.block == 0


def _is_as_it_is(spec: PackedSpec) -> bool:
    """Whether codes are multiplied without being dequantised."""
    return spec.format in FLOATS or spec.format == "fp8" or _has_blocks(spec)


def _packed_tile(spec: PackedSpec) -> _Tile | None:
    """What a block multiplies of codes that it decodes; None where `_is_as_it_is`, where k tiles share qparams with a
    part of others, and where there are fewer than are held."""
    sets, whole = group_sets(spec), 16 // spec.kind.bits
    if _is_as_it_is(spec) or (sets not in (0, 1, 2) and sets % whole):
        return None
    words = whole // min(sets, whole) if sets else 2
    held = 3 if words == 1 else 2
    return _Tile(256, 3, held=held, words=words) if k_tiles(spec) >= held else None


def pays(slots: Tensor, weight: Tensor, spec: PackedSpec) -> bool:
    """Whether `multiply` is faster than the kernel that streams weights; `slots` has a row for each."""
    least = LEAST_SLOTS_BLOCKS if _has_blocks(spec) else LEAST_SLOTS
    if not _is_as_it_is(spec):
        least = LEAST_SLOTS_PACKED if _packed_tile(spec) else LEAST_SLOTS_DEQUANTISED
    return len(slots) >= least * len(weight) and gpu(weight.device).capability == CAPABILITY


def fits(call: Grouped) -> bool:
    """Whether `multiply` takes these tensors."""
    out, spec, places = call.out, call.spec, len(call.weight)
    if gpu(call.x.device).capability != CAPABILITY or places > _MOST_PLACES or spec.inputs == 0:
        return False
    if is_float(out) and call.activation is not None:
        return False
    row_bytes = out.stride(0) * out.element_size()
    is_aligned = out.data_ptr() % 16 == row_bytes % 16 == out.shape[1] * out.element_size() % 16 == 0
    is_e4m3 = _is_as_it_is(spec) and spec.kind.is_e4m3
    has_steps = spec.depth * (1 if is_e4m3 else 2) > (
        256 if _has_blocks(spec) else 128
    )  # as many as tiles are kept for
    return has_steps and is_aligned and spec.features % 2 == 0 and call.x.numel() < 1 << 33


def multiply(call: Grouped) -> None:
    """Writes the products of all slots that have a place."""
    x, spec = _padded(call.x, call.spec), call.spec
    if _is_as_it_is(spec):
        codes, scales = x, None
        if _has_blocks(spec):
            codes, scales = quantise_blocks(x, spec)
        elif spec.format == "fp8":
            codes, scales, _ = quantise_rows(x, spec, torch.float8_e4m3fn)
        _launch(replace(call, x=codes), _matrices(call.weight, spec, codes.dtype), scales)
        return
    device = gpu(x.device)
    has_few = call.slots <= MOST_SLOTS_PACKED * len(call.weight)
    if has_few and (tile := _packed_tile(spec)) and tile.shared_bytes(len(call.weight)) <= device.shared_bytes:
        _launch(replace(call, x=x), None)
        return
    each = max(1, _MOST_SCRATCH // (call.spec.features * call.spec.depth * x.element_size()))
    for first in range(0, len(call.weight), each):
        some = slice(first, first + each)
        matrices = dequantised(call.weight[some], call.spec, x.dtype)
        routing = call.routing._replace(starts=call.routing.starts[:, first : first + len(matrices) + 1])
        bias = None if call.bias is None else call.bias[some]
        _launch(replace(call, x=x, weight=call.weight[some], bias=bias, routing=routing), matrices)


def _matrices(weight: Tensor, spec: PackedSpec, dtype: torch.dtype) -> Tensor:
    """Returns the codes [places, features, depth]: a view."""
    place_bytes, depth = spec.shape[0] * spec.shape[1], spec.depth
    sizes, strides = (len(weight), spec.features, depth), (place_bytes // dtype.itemsize, depth, 1)
    return weight.view(-1).view(dtype).as_strided(sizes, strides)


def _launch(call: Grouped, matrices: Tensor | None, scales: Tensor | None = None) -> None:
    """matrices [places, features, depth] of x's type, or None: the call's weight is decoded; scales float32 of the rows
    of x, or [steps, rows]."""
    x, routing, out, spec = call.x, call.routing, call.out, call.spec
    top_k, places = routing.places.shape[1], len(call.weight)
    has_blocks = scales is not None and scales.ndim == 2
    packed = _packed_tile(spec) if matrices is None else None
    tile = packed or (_BLOCKS if has_blocks else _WHOLE)
    outputs = spec.features if call.activation is None else spec.features // 2
    depth_bytes = spec.depth * x.element_size()
    row_chunks = x.stride(0) * x.element_size() // 16
    product = _PRODUCT.pack(
        spec.shape[0] * spec.shape[1], spec.features * k_tiles(spec) * K_TILE_BYTES, places,
        top_k, top_k if call.has_own_rows else 1, spec.features, outputs, -(-depth_bytes // 128),
        row_chunks, row_chunks, out.stride(0), call.activation or 0,
        scales.stride(0) if scales is not None else 0, k_tiles(spec), spec.qparams,
        group_sets(spec) * spec.kind.bits // 16,
    )  # fmt: skip
    blocks = min(gpu(x.device).multiprocessors, _most_tiles(call.slots, places, outputs, tile))
    weight_map = bytes(128) if matrices is None else tensor_map(matrices, tile.features // 2)
    arguments = (
        weight_map, call.weight, x, scales, call.bias, routing.starts, routing.slots,
        torch.zeros(1, dtype=torch.int32, device=x.device), out, product,
    )  # fmt: skip
    chosen = _kernel(x.dtype, call.activation is not None, out.dtype, has_blocks, spec if packed else None)
    launch(chosen, (blocks,), _THREADS, arguments, tile.shared_bytes(places), is_early=True)


def _most_tiles(slots: int, places: int, outputs: int, tile: _Tile) -> int:
    """Returns a number of tiles that no routing exceeds."""
    return (slots // _ROWS + min(slots, places)) * -(-outputs // (tile.features // 2))


def _padded(x: Tensor, spec: PackedSpec) -> Tensor:
    """Returns x with `k_offset` zeros before it, in rows of whole 16 bytes that begin at a multiple of 16."""
    if spec.k_offset or spec.inputs % 8 or x.data_ptr() % 16:
        return functional.pad(x, (spec.k_offset, -(spec.k_offset + spec.inputs) % 8))
    return x


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    if capability == CAPABILITY:
        for dtype in HALVES:
            for is_gated, out in itertools.product((False, True), (dtype, torch.float32)):
                if not (is_gated and out is torch.float32):
                    yield _kernel(dtype, is_gated, out)
                    yield from (_kernel(torch.float8_e4m3fn, is_gated, out, blocks) for blocks in (False, True))
                    specs = (spec for spec in common_specs(dtype) if not _is_as_it_is(spec))
                    yield from (_kernel(dtype, is_gated, out, spec=spec) for spec in specs)


def _kernel(
    inputs: torch.dtype, is_gated: bool, out: torch.dtype, has_blocks: bool = False, spec: PackedSpec | None = None
) -> Kernel:
    """Returns the kernel; with `spec`, the one that decodes such a weight."""
    macros = {
        "BLOCKS": int(has_blocks),
        "GATED": int(is_gated),
        "OUT_FLOATS": int(out is torch.float32),
        **element_macro(inputs, out),
    }
    if spec:
        macros |= bits_macros(spec, inputs) | {"GROUP_SETS": min(group_sets(spec), 16 // spec.kind.bits)}
    return kernel("moe/grouped_sm90.cu", "grouped_sm90", E4M3=int(inputs is torch.float8_e4m3fn), **macros)
