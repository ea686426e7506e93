"""Products with weights of experts in rows, on a GPU: the shape of the blocks of product.cu, and its launches.

x is bfloat16 or float16, out of its type or float32; sums are float32. Weights of 16 bits are of x's type, quantised
ones meet x as it is, whatever the spec's activation. A token's weighted sum has one order, that of its places: up to
`_MOST_SUMMED_SLOTS` slots a block goes over all places itself, with more every slot's product is kept, and another
kernel adds these up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, gpu, kernel, launch, shared_limit
from allspan.kernels.cuda.linear.call import GATED, is_float
from allspan.kernels.cuda.linear.macros import bits_macros, common_specs, group_sets, groups, k_tiles
from allspan.kernels.cuda.moe import grouped_sm90
from allspan.kernels.cuda.moe.rows import sum_choices
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import FLOATS

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_SLOTS, _GATED, _SUM = 0, 1, 2
"""Modes of the kernel."""
_MOST_SUMMED_SLOTS = 512
"""Slots whose products a block keeps in shared memory."""
_HELD_SLOTS, _MOST_PLACES = 512, 2047
_AHEAD = 104 << 10
"""Bytes of weights that a block has room for, if that is two spans of each warp: what it leaves is the cache for x."""
_PRODUCT = struct.Struct("=2q8iI8i4x")


@dataclass(frozen=True, slots=True)
class _Form:
    """The shape of the thread blocks of `expert_product`: its macros."""

    tiles: int
    """Multiples of 8 rows that a tile has."""
    warps: int
    stages: int

    def shared_bytes(self, spec: PackedSpec, table: int, places: int) -> int:
        """`table`: products and what else of 4 bytes a block keeps."""
        parts = self.warps * 2 * self.tiles * 512
        numbers = table + _HELD_SLOTS + self.warps + 3 * places + 2
        return self.warps * self.stages * _stage_bytes(spec) + parts + 4 * numbers


@dataclass(frozen=True, slots=True)
class _Call:
    """x [rows, K], or of `has_own_rows` [slots, K]; weight uint8 [places, *spec.shape]; out in rows of slots, or of
    tokens for `_SUM`."""

    mode: int
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    spec: PackedSpec
    routing: Routing[Tensor]
    out: Tensor
    column: int = 0
    activation: int = 0
    has_own_rows: bool = False
    adds: bool = False
    is_settled: bool = False

    @property
    def rows(self) -> int:
        return len(self.routing.places)

    @property
    def slots(self) -> int:
        return self.routing.places.numel()

    def grouped(self) -> grouped_sm90.Grouped:
        """Returns the same call for the kernels of many rows."""
        out = self.out[:, self.column : self.column + self.width]
        activation = self.activation if self.mode == _GATED else None
        arguments = self.x, self.weight, self.bias, self.spec, self.routing, out, activation, self.has_own_rows
        return grouped_sm90.Grouped(*arguments)

    @property
    def width(self) -> int:
        """Outputs."""
        return self.spec.features // 2 if self.mode == _GATED else self.spec.features


def expert_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    column: int,
    routing: Routing[Tensor],
    out: Tensor,
) -> None:
    """See `OpSet.expert_linear`. Raises ValueError for what the kernels would read or write past."""
    rows = out.view(-1, out.shape[2])
    _run(_Call(_SLOTS, x.flatten(0, -2), weight, bias, spec, routing, rows, column, has_own_rows=x.dim() == 3))


def expert_gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    activation: str,
    routing: Routing[Tensor],
    out: Tensor,
    is_settled: bool = False,
) -> None:
    """See `OpSet.expert_gated_linear`."""
    if len(spec.parts) != 2 or spec.parts[0] != spec.parts[1]:
        raise ValueError(f"weight: parts {spec.parts} are not two of one size")
    rows = out.view(-1, out.shape[2])
    call = _Call(_GATED, x.flatten(0, -2), weight, bias, spec, routing, rows, activation=GATED[activation])
    _run(replace(call, has_own_rows=x.dim() == 3, is_settled=is_settled))


def expert_sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    routing: Routing[Tensor],
    adds: bool,
    out: Tensor,
) -> None:
    """See `OpSet.expert_sum`."""
    rows = x.view(-1, x.shape[2])
    is_many = grouped_sm90.pays(rows, weight, spec) and out.shape[1] % 8 == 0
    if routing.places.numel() <= _MOST_SUMMED_SLOTS and not is_many:
        _run(_Call(_SUM, rows, weight, bias, spec, routing, out, has_own_rows=True, adds=adds))
        return
    if out.shape[1] % 4:
        raise ValueError(f"out: {out.shape[1]} columns are no multiple of 4")
    dtype = _dtype_of_products(x, out) if is_many else torch.float32
    products = torch.empty(*routing.places.shape, out.shape[1], dtype=dtype, device=x.device)
    _run(_Call(_SLOTS, rows, weight, bias, spec, routing, products.view(-1, out.shape[1]), has_own_rows=True))
    sum_choices(products, routing, adds, out, x.dtype)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        for spec in common_specs(dtype):
            for mode in (_SLOTS, _GATED, _SUM):
                forms = [_form(spec, mode, each, 0, 128, shared_limit(capability)) for each in (1, 16)]
                yield from (_kernel(spec, form, mode, dtype) for form in dict.fromkeys(forms))


def _run(call: _Call) -> None:
    _check(call)
    if not call.rows or not call.width:
        return
    is_whole = len(call.weight) == 1 or call.spec.shape[0] * call.spec.shape[1] % 16 == 0
    if call.mode != _SUM and is_whole and grouped_sm90.takes(grouped := call.grouped()):
        grouped_sm90.multiply(grouped)
        return
    spec, device = call.spec, gpu(call.x.device)
    places = len(call.weight)
    blocks = _blocks(call, device)
    own = -(-call.width // blocks) if call.mode == _SUM else 0
    x = _padded(call.x, spec)
    table = call.slots * own + _HELD_SLOTS if own else 0
    form = _form(spec, call.mode, call.slots / places, table, places, device.shared_bytes)
    count, sets = groups(spec)
    product = _PRODUCT.pack(
        spec.shape[0] * spec.shape[1], spec.features * k_tiles(spec) * 64,
        places, call.rows, call.routing.places.shape[1], call.routing.places.shape[1] if call.has_own_rows else 1,
        spec.features, x.shape[1], k_tiles(spec), count, _by_group(spec, sets),
        x.stride(0), call.out.stride(0), call.column, call.activation, is_float(call.out), call.adds, -(-own // 16),
        call.is_settled,
    )  # fmt: skip
    routing = call.routing
    arguments = (call.weight, x, call.bias, routing.starts, routing.slots, routing.weights, call.out, product)
    shared = form.shared_bytes(spec, table, places)
    what = _kernel(spec, form, call.mode, x.dtype, is_whole)
    launch(what, (blocks,), form.warps * 32, arguments, shared, is_early=True)


def _dtype_of_products(x: Tensor, out: Tensor) -> torch.dtype:
    """Returns what many products of single slots are kept in, until they are added up: bfloat16, whose range is
    float32's, where x is and all rows are whole 16 bytes."""
    is_aligned = out.data_ptr() % 16 == out.stride(0) * out.element_size() % 16 == 0
    return torch.bfloat16 if is_aligned and x.dtype == torch.bfloat16 else torch.float32


def _blocks(call: _Call, device: Gpu) -> int:
    """Returns the number of thread blocks: no more than have work for every routing."""
    if call.mode == _SUM:
        return min(device.multiprocessors, call.width)
    return min(device.multiprocessors, call.slots * -(-call.width // 8))


def _form(spec: PackedSpec, mode: int, each: float, table: int, places: int, room: int) -> _Form:
    """Returns the form for so many slots a place, with as many stages as pay and fit."""
    tiles = 1 if mode == _SUM or each <= 6 else 4
    for warps in (16, 8, 4) if tiles == 1 else (8, 4):
        for stages in range(max(2, _AHEAD // (warps * _stage_bytes(spec))), 1, -1):
            form = _Form(tiles, warps, stages)
            if form.shared_bytes(spec, table, places) <= room:
                return form
    raise ValueError(f"experts: {spec} with {places} places do not fit into the shared memory of this GPU")


def _stage_bytes(spec: PackedSpec) -> int:
    """Returns the size of a span, 128 inputs of 16 features: codes and scales."""
    sets = _group_sets(spec)
    return 256 * spec.kind.bits + (64 * (4 // sets) if sets else 0)


def _by_group(spec: PackedSpec, sets: int) -> int:
    """Returns 2^32 over the number of spans, or of sets where spans have several groups, that share scales, rounded
    up; 0 for one."""
    shared = sets // 4 if _group_sets(spec) == 4 else sets
    return -(-(1 << 32) // shared) if shared > 1 else 0


def _group_sets(spec: PackedSpec) -> int:
    """Returns the number of sets of 32 inputs of a span that surely share a scale; 0 where all do."""
    sets = group_sets(spec)
    return min(sets, 4) if sets in (0, 1, 2) or sets % 4 == 0 else 1


def _padded(x: Tensor, spec: PackedSpec) -> Tensor:
    """Returns x with `k_offset` zeros before it, in rows of whole 16 bytes that begin at a multiple of 16."""
    if spec.k_offset or spec.inputs % 8 or x.data_ptr() % 16:
        return functional.pad(x, (spec.k_offset, -(spec.k_offset + spec.inputs) % 8))
    return x


def _kernel(spec: PackedSpec, form: _Form, mode: int, dtype: torch.dtype, is_whole: bool = True) -> Kernel:
    sizes = {"TILES": form.tiles, "WARPS": form.warps, "STAGES": form.stages}
    sizes |= {"WORDS": int(not is_whole), "GROUP_SETS": _group_sets(spec)}
    return kernel("moe/product.cu", "expert_product", MODE=mode, **bits_macros(spec, dtype), **sizes)


def _check(call: _Call) -> None:
    x, weight, bias, spec, routing, out = call.x, call.weight, call.bias, call.spec, call.routing, call.out
    places, (n, top_k) = len(weight), routing.places.shape
    if places > _MOST_PLACES:
        raise ValueError(f"weight: {places} experts on a rank, at most {_MOST_PLACES} are possible; use more ranks")
    if weight.dtype != torch.uint8 or tuple(weight.shape[1:]) != spec.shape or not weight.is_contiguous():
        raise ValueError(f"weight: {weight.dtype} {list(weight.shape)} is not [places, *spec.shape] of {spec}")
    if spec.memory != "rows":
        raise ValueError(f"weight: lies in {spec.memory}, the kernels of a GPU take rows")
    rows = n * top_k if call.has_own_rows else n
    if x.dtype not in HALVES or tuple(x.shape) != (rows, spec.inputs) or not x.is_contiguous():
        raise ValueError(f"x: {x.dtype} {list(x.shape)} is not bfloat16 or float16 [{rows}, {spec.inputs}]")
    if FLOATS.get(spec.format, x.dtype) != x.dtype:
        raise ValueError(f"x: {x.dtype} does not meet weights in {spec.format}; convert one of them")
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != (places, spec.features)):
        raise ValueError(f"bias: {bias.dtype} {list(bias.shape)} is not float32 [{places}, {spec.features}]")
    _check_routing(routing, places)
    most = n if call.mode == _SUM else n * top_k
    if out.dtype not in (torch.float32, x.dtype) or len(out) != most or out.shape[1] < call.column + call.width:
        raise ValueError(f"out: {out.dtype} {list(out.shape)} does not take {most} rows of {call.column + call.width}")
    if out.stride(1) != 1:
        raise ValueError("out: the elements of a row do not lie together")


def _check_routing(routing: Routing[Tensor], places: int) -> None:
    n, top_k = routing.places.shape
    for name, dtype in (("places", torch.int32), ("weights", torch.float32), ("slots", torch.int32)):
        tensor = getattr(routing, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != (n, top_k) or not tensor.is_contiguous():
            raise ValueError(f"routing.{name}: {tensor.dtype} {list(tensor.shape)} is not {dtype} [{n}, {top_k}]")
    if routing.starts.dtype != torch.int32 or routing.starts.numel() != places + 1:
        raise ValueError(f"routing.starts: {list(routing.starts.shape)} is not int32 [1, {places + 1}]")
