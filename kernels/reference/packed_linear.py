"""Packed weights in plain torch: how they are packed and unpacked, and the products with them.

`allspan.kernels.packed_spec` has the layout. A weight's `Fields` are what it is made of, for all its features, those of
the parts one below the other:

- of f32, bf16 and f16: "weight" [features, inputs];
- of quantised formats: "codes" uint8 [features, depth], whose depth counts `k_offset` and the last block's tail,
  and the qparams of `FIELDS`, [features, blocks · count], or [features, 1] where they are in the head.

Works on CPU and CUDA tensors. Products are summed in float64: backends are held to them within float32's error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.packed_spec import FEATURES, PackedSpec
from allspan.kernels.reference.elementwise import gated
from allspan.kernels.row_layout import fields_of_rows, pack_rows

Fields = Mapping[str, Tensor]

GROUP = 32
"""Inputs whose codes lie together."""

LEAST = 2.0**-100
"""A group of activations with no magnitude of at least this counts as all zeros, so that no quotient overflows."""

_PANELS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Field:
    """Qparams that lie before a block's codes, or in a panel's head, as [count][16 features]."""

    name: str
    dtype: torch.dtype
    count: int = 1


_SCALES = Field("scales", torch.float16)
_OFFSETS = Field("offsets", torch.float16)
_CHANNEL = (Field("scales", torch.float32), Field("offsets", torch.float32))
_HALVES = (Field("d", torch.float16), Field("s", torch.int8, 16))
_GROUPS = (Field("d", torch.float16), Field("s", torch.int8, 8))
_K = (Field("d", torch.float16), Field("dmin", torch.float16), Field("s", torch.uint8, 8), Field("m", torch.uint8, 8))

FIELDS: Mapping[str, tuple[Field, ...]] = {
    "f32": (),
    "bf16": (),
    "f16": (),
    "channel8": _CHANNEL,
    "channel4": _CHANNEL,
    "group8": (_SCALES, _OFFSETS),
    "group4": (_SCALES, _OFFSETS),
    "fp8": (_CHANNEL[0],),
    "fp8_block": (_CHANNEL[0],),
    "q8_0": (_SCALES,),
    "q4_0": (_SCALES,),
    "q5_0": (_SCALES,),
    "q5_1": (_SCALES, _OFFSETS),
    "q4_k": _K,
    "q5_k": _K,
    "q6_k": _HALVES,
    "q3_k": _HALVES,
    "q2_k": (Field("d", torch.float16), Field("dmin", torch.float16), Field("sm", torch.uint8, 16)),
    "iq4_nl": (_SCALES,),
    "mxfp4": (Field("e", torch.uint8),),
    "iq4_xs": _GROUPS,
    "iq3_s": _GROUPS,
    "iq3_xxs": _GROUPS,
    "iq2_xxs": _GROUPS,
    "iq2_xs": _HALVES,
    "iq2_s": _HALVES,
}


def pack(spec: PackedSpec, fields: Fields) -> Tensor:
    """The packed weight, uint8 of `spec.shape`, on the fields' device."""
    kind = spec.kind
    if spec.memory == "rows":
        weight = next(iter(fields.values())).new_zeros(spec.shape, dtype=torch.uint8)
        pack_rows(fields, weight, spec, 0)
        return weight
    if not kind.is_quantised:
        return _pack_floats(spec, fields["weight"])
    codes = _to_panels(spec, fields["codes"].to(torch.uint8))
    pieces = [_pack_codes(codes, kind.bits).reshape(spec.panels, spec.blocks, -1)]
    qparams = [_pack_field(spec, field, fields[field.name]) for field in FIELDS[spec.format]]
    if kind.head_bytes:
        return torch.cat([*(part.flatten(1) for part in qparams), pieces[0].flatten(1)], 1)
    return torch.cat([*qparams, *pieces], 2).flatten(1).contiguous()


def fields_of(weight: Tensor, spec: PackedSpec) -> dict[str, Tensor]:
    """What was packed: the inverse of `pack`."""
    kind = spec.kind
    if spec.memory == "rows":
        return fields_of_rows(weight, spec)
    if not kind.is_quantised:
        return {"weight": _unpack_floats(weight, spec)}
    blocks = weight[:, kind.head_bytes :].reshape(spec.panels, spec.blocks, spec.block_bytes)
    qparams = weight[:, : kind.head_bytes].unsqueeze(1) if kind.head_bytes else blocks
    fields, begin = {}, 0
    for field in FIELDS[spec.format]:
        end = begin + field.count * FEATURES * field.dtype.itemsize
        values = qparams[:, :, begin:end].contiguous().view(field.dtype)
        values = values.reshape(spec.panels, -1, FEATURES).transpose(1, 2)
        fields[field.name], begin = _from_panels(spec, values), end
    packed = blocks[:, :, kind.scale_bytes :].reshape(spec.panels, spec.blocks * spec.block // GROUP, -1)
    return fields | {"codes": _from_panels(spec, _unpack_codes(packed, kind.bits))}


def unpack(weight: Tensor, spec: PackedSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the packed weight holds: [spec.features, spec.inputs]."""
    if spec.inputs == 0:
        return weight.new_empty(spec.features, 0, dtype=dtype)
    return _values(fields_of(weight, spec), spec, dtype)


def _values(fields: Fields, spec: PackedSpec, dtype: torch.dtype) -> Tensor:
    """[features, spec.inputs]."""
    if "codes" not in fields:
        return fields["weight"].to(dtype)
    zero = spec.kind.zero
    codes = fields["codes"]
    if spec.kind.is_e4m3:
        codes = codes.view(torch.float8_e4m3fn)
    elif spec.kind.values:
        codes = torch.tensor(spec.kind.values, dtype=torch.int8, device=codes.device)[codes.int()]
    codes = codes.to(dtype)
    scales, offsets = _scales(fields, dtype, spec.kind.step)
    grouped = codes.reshape(len(codes), scales.shape[1], -1) if scales.shape[1] else codes.unsqueeze(2)
    if zero is None:
        values = grouped * scales.unsqueeze(2) - offsets.unsqueeze(2)
    else:
        values = (grouped - zero) * scales.unsqueeze(2)
    return values.flatten(1)[:, spec.k_offset : spec.k_offset + spec.inputs]


def quantise_activations(x: Tensor, spec: PackedSpec) -> tuple[Tensor, Tensor]:
    """x float32 [n, inputs] → integers [n, inputs] (as float32) and their scales, float32 [n, inputs].

    With m the largest magnitude of a group of `PackedSpec.x_group` inputs, counted from the first block's start:
    number = round(x · (most / m)), halves to even, and scale = m / most, where most is 127, or 32512 for a16.
    A group below `LEAST` has numbers and scale 0; one with a NaN or an infinity has numbers 0 and the scale NaN.
    """
    rows, inputs = x.shape
    most = 32512.0 if spec.activation == "a16" else 127.0
    size, k_offset = spec.x_group, spec.k_offset
    padded = functional.pad(x.float(), (k_offset, -(k_offset + inputs) % size)).reshape(rows, -1, size)
    largest = padded.abs().amax(2, keepdim=True) if padded.numel() else padded.new_zeros(*padded.shape[:2], 1)
    largest = torch.where(largest < LEAST, 0.0, largest)
    usable = (largest > 0) & largest.isfinite()
    factors = largest.new_tensor(most).div(largest)  # a number / a tensor would round twice
    numbers = torch.where(usable, (padded * factors).round(), 0.0)
    scales = torch.where(largest.isfinite(), largest / most, torch.nan).expand_as(padded)
    inside = slice(k_offset, k_offset + inputs)
    return numbers.reshape(rows, -1)[:, inside], scales.reshape(rows, -1)[:, inside]


def activations(x: Tensor, spec: PackedSpec) -> Tensor:
    """x as the product sees it, float64."""
    if spec.activation == "f32":
        return x.double()
    if spec.activation == "f16":
        return x.half().double()
    if spec.activation in ("bf16", "e4m3"):
        return x.bfloat16().double()
    numbers, scales = quantise_activations(x, spec)
    return numbers.double() * scales.double()


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor) -> None:
    """See `OpSet.packed_linear`."""
    out[:, column : column + spec.features] = product(x, weight, bias, spec)


def packed_linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
) -> None:
    """See `OpSet.packed_linear_add`."""
    out[:, column : column + spec.features] += product(x, weight, bias, spec)


def packed_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, activation: str, out: Tensor
) -> None:
    """See `OpSet.packed_gated_linear`."""
    gate, up = torch.split(product(x, weight, bias, spec), list(spec.parts), 1)
    out[:, column : column + spec.parts[0]] = gated(gate, activation, up)


def packed_embedding(ids: Tensor, weight: Tensor, spec: PackedSpec, first_row: int, out: Tensor) -> None:
    """See `OpSet.packed_embedding`."""
    rows = ids.long() - first_row
    ours = (rows >= 0) & (rows < spec.features)
    rows = rows[ours]
    out.zero_()
    if not len(rows):
        return
    if spec.memory == "rows":
        out[ours] = _values(fields_of_rows(weight, spec, rows), spec, out.dtype)
        return
    panels = unpack(weight[rows // FEATURES], replace(spec, parts=(len(rows) * FEATURES,)))
    out[ours] = panels.reshape(len(rows), FEATURES, spec.inputs)[torch.arange(len(rows)), rows % FEATURES]


def product(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec) -> Tensor:
    """float32 [n, spec.features]; unpacks some panels at a time."""
    seen = activations(x, spec)
    if spec.memory == "rows":
        product = (seen @ unpack(weight, spec, torch.float64).T).float()
        return product if bias is None else product + bias
    whole = x.new_empty(len(x), spec.panels * FEATURES, dtype=torch.float32)
    for begin in range(0, spec.panels, _PANELS_AT_ONCE):
        part = weight[begin : begin + _PANELS_AT_ONCE]
        features = len(part) * FEATURES
        values = unpack(part, replace(spec, parts=(features,), interleaved=False), torch.float64)
        whole[:, begin * FEATURES : begin * FEATURES + features] = (seen @ values.T).float()
    product = whole[:, _columns(spec).to(x.device)]
    return product if bias is None else product + bias


def _scales(fields: Fields, dtype: torch.dtype, step: float) -> tuple[Tensor, Tensor]:
    """Scales and offsets (zeros where there are none), [features, groups]."""
    if "e" in fields:
        scales = torch.ldexp(torch.ones_like(fields["e"], dtype=torch.float64), fields["e"].int() - 128).to(dtype)
        return scales, torch.zeros_like(scales)
    if "sm" in fields:
        s, m = fields["sm"] & 15, fields["sm"] >> 4
        return _times(fields["d"], s, dtype), _times(fields["dmin"], m, dtype)
    if "d" not in fields:
        scales = fields["scales"].to(dtype)
        return scales, fields["offsets"].to(dtype) if "offsets" in fields else torch.zeros_like(scales)
    scales = _times(fields["d"], fields["s"], dtype) * step
    if "dmin" not in fields:
        return scales, torch.zeros_like(scales)
    return scales, _times(fields["dmin"], fields["m"], dtype)


def _times(d: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """Each block's d times its scales s."""
    return d.to(dtype).repeat_interleave(s.shape[1] // max(1, d.shape[1]), 1) * s.to(dtype)


def _panel_starts(spec: PackedSpec) -> Iterator[tuple[int, int]]:
    """(first feature, features) of each panel."""
    begins = [sum(spec.parts[:i]) for i in range(len(spec.parts))]
    panels = [
        [(begin + first, min(FEATURES, part - first)) for first in range(0, part, FEATURES)]
        for begin, part in zip(begins, spec.parts, strict=True)
    ]
    if spec.interleaved:
        panels = [[panel for pair in zip(*panels, strict=True) for panel in pair]]
    return (panel for part in panels for panel in part)


def _columns(spec: PackedSpec) -> Tensor:
    """[features]: where each feature lies among those of the panels."""
    columns = torch.empty(spec.features, dtype=torch.long)
    for panel, (first, count) in enumerate(_panel_starts(spec)):
        columns[first : first + count] = torch.arange(count) + panel * FEATURES
    return columns


def _to_panels(spec: PackedSpec, values: Tensor) -> Tensor:
    """[features, …] → [panels, 16, …], zeros where a panel has too few."""
    panels = values.new_zeros(spec.panels * FEATURES, *values.shape[1:])
    panels[_columns(spec).to(values.device)] = values
    return panels.reshape(spec.panels, FEATURES, *values.shape[1:])


def _from_panels(spec: PackedSpec, panels: Tensor) -> Tensor:
    """The inverse of `_to_panels`."""
    return panels.reshape(-1, *panels.shape[2:])[_columns(spec).to(panels.device)]


def _pack_field(spec: PackedSpec, field: Field, values: Tensor) -> Tensor:
    """uint8 [panels, blocks (or 1), bytes]."""
    panels = _to_panels(spec, values.to(field.dtype))
    blocks = panels.shape[2] // field.count
    ordered = panels.reshape(spec.panels, FEATURES, blocks, field.count).permute(0, 2, 3, 1).contiguous()
    return ordered.view(torch.uint8).reshape(spec.panels, blocks, -1)


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [panels, 16, depth] → [panels, groups of 32, bytes]."""
    panels, _, depth = codes.shape
    quads = codes.reshape(panels, FEATURES, depth // GROUP, 8, 4).permute(0, 2, 3, 1, 4)
    quads = quads.reshape(panels, depth // GROUP, 8, 64)
    if bits == 8:
        return quads.flatten(2)
    if bits in (2, 3):
        packed = _join_bits((quads & 3).reshape(panels, -1, 2, 4, 64), 2, 3).flatten(2)
        if bits == 2:
            return packed
        return torch.cat([packed, _join_bits((quads >> 2).reshape(panels, -1, 8, 8, 8), 1, 4).flatten(2)], 2)
    low = quads & 15
    packed = (low[:, :, :4] | low[:, :, 4:] << 4).flatten(2)
    if bits == 4:
        return packed
    high = quads >> 4
    if bits == 5:
        return torch.cat([packed, _join_bits(high.reshape(panels, -1, 8, 8, 8), 1, 4).flatten(2)], 2)
    return torch.cat([packed, _join_bits(high.reshape(panels, -1, 2, 4, 64), 2, 3).flatten(2)], 2)


def _unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack_codes`."""
    panels, groups = packed.shape[:2]
    if bits == 8:
        quads = packed
    elif bits in (2, 3):
        quads = _split_bits(packed[:, :, :128].reshape(panels, groups, 2, 64), 2, 3).flatten(2)
        if bits == 3:
            quads = quads | _split_bits(packed[:, :, 128:], 1, 3).flatten(2) << 2
    else:
        low = packed[:, :, :256]
        quads = torch.cat([low & 15, low >> 4], 2)
        if bits == 5:
            quads = quads | _split_bits(packed[:, :, 256:], 1, 3).flatten(2) << 4
        elif bits == 6:
            halves = packed[:, :, 256:].reshape(panels, groups, 2, 64)
            quads = quads | _split_bits(halves, 2, 3).flatten(2) << 4
    ordered = quads.reshape(panels, groups, 8, FEATURES, 4).permute(0, 3, 1, 2, 4)
    return ordered.reshape(panels, FEATURES, groups * GROUP)


def _join_bits(values: Tensor, bits: int, dim: int) -> Tensor:
    """Bytes from 8 / bits values each, which lie along `dim`, the lowest first."""
    joined = torch.zeros_like(values.select(dim, 0))
    for i in range(8 // bits):
        joined |= values.select(dim, i) << (i * bits)
    return joined


def _split_bits(joined: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse of `_join_bits`: a new dimension `dim`."""
    mask = (1 << bits) - 1
    return torch.stack([joined >> (i * bits) & mask for i in range(8 // bits)], dim)


def _pack_floats(spec: PackedSpec, weight: Tensor) -> Tensor:
    dtype = torch.bfloat16 if spec.format == "bf16" else torch.float32
    depth = spec.blocks * spec.block
    padded = functional.pad(weight.to(dtype), (spec.k_offset, depth - spec.k_offset - spec.inputs))
    pair = 4 // dtype.itemsize
    panels = _to_panels(spec, padded).reshape(spec.panels, FEATURES, depth // pair, pair).transpose(1, 2)
    return panels.contiguous().reshape(spec.panels, -1).view(torch.uint8).reshape(spec.shape)


def _unpack_floats(weight: Tensor, spec: PackedSpec) -> Tensor:
    dtype = torch.bfloat16 if spec.format == "bf16" else torch.float32
    pair, depth = 4 // dtype.itemsize, spec.blocks * spec.block
    values = weight.contiguous().view(dtype).reshape(spec.panels, depth // pair, FEATURES, pair).transpose(1, 2)
    features = _from_panels(spec, values.reshape(spec.panels, FEATURES, depth))
    return features[:, spec.k_offset : spec.k_offset + spec.inputs]
