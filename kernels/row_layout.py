"""Packed weights in rows, as GPUs stream them: the codes of one feature after the other, then all scales.

A weight is one contiguous uint8 tensor of `PackedSpec.shape`, its parts one below the other:

    codes    [features][k tiles of 64 bytes]
    qparams  [groups][features][scale, offset]: all features of a group together, since threads that work on
             neighbouring features need them at once; where a format has a zero, offset = zero · scale
             (of fp8_block: [groups][features], scales alone; of mxfp4: [k tiles][features][4 groups], a byte each)

A k tile holds 32 inputs of 16 bits, 64 of 8 or 128 of 4: some sets of 32. Each of its four 16-byte chunks is what one
of four threads loads at once; chunk t holds inputs 8·t … 8·t + 7 of every set, so that the four have whole sets between
them (groups are made of whole sets), and x is read 16 bytes at a time, too. 8 codes of 4 bits are a little-endian
uint32, in which code 2·j is at bit 4·j and code 2·j + 1 at bit 4·j + 16: two neighbours come out of a shift and a mask.

Codes are unsigned, but those of 8 bits lie less 128, as int8: products of integers take them as they are. Before
the first input lie `k_offset` codes, after the last zeros up to the end of the k tile.

| format | qparams (scale and offset) |
|---|---|
| bf16, f16 | none: rows are those of a plain matrix |
| channel8, channel4 | float32, one group |
| group8, group4 | float16 for each `group` inputs |
| q8_0 (zero 128), q4_0 (zero 8) | float16 for each 32 |
| fp8 | float32, one group; codes are e4m3 numbers, as they are |
| fp8_block | float32 for each 128; codes are those of fp8 |
| mxfp4 | a byte e for each 32: the scale of twice a number is 2^(e - 128); codes are e2m1 numbers, as they are |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.packed_spec import Format, PackedSpec

FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16}
"""Formats that are plain matrices."""


def codes_of(weight: Tensor, spec: PackedSpec) -> Tensor:
    """[features, bytes] uint8 or, of bf16 and f16, [features, depth] in that: a view of where codes lie."""
    kind = spec.kind
    size = spec.depth * kind.bits // 8
    codes = weight.view(-1)[: spec.features * size].view(spec.features, size)
    return codes if kind.is_quantised else codes.view(FLOATS[spec.format])


def qparams_of(weight: Tensor, spec: PackedSpec) -> Tensor:
    """[groups, features, 2]: a view of the scales and offsets; of fp8_block [groups, features, 1], of mxfp4 uint8
    [k tiles, features, 4]."""
    kind = spec.kind
    begin = spec.features * spec.depth * kind.bits // 8
    if kind.is_e2m1:
        return weight.view(-1)[begin:].view(spec.qparams, spec.features, 4)
    dtype = torch.float32 if kind.head_bytes or kind.is_float else torch.float16
    each = 1 if kind.is_float and kind.scale_bytes else 2
    return weight.view(-1)[begin:].view(dtype).view(spec.groups, spec.features, each if spec.groups else 0)


def pack_rows(fields: Mapping[str, Tensor], weight: Tensor, spec: PackedSpec, first: int) -> None:
    """Stores features `first` and on, given as `allspan.kernels.reference.packed_linear` has them."""
    if not spec.kind.is_quantised:
        values = fields["weight"]
        into = codes_of(weight, spec)[first : first + len(values)]
        into[:, spec.k_offset : spec.k_offset + spec.inputs] = values.to(weight.device)
        into[:, : spec.k_offset], into[:, spec.k_offset + spec.inputs :] = 0, 0
        return
    codes = fields["codes"].to(weight.device, torch.uint8)[:, : spec.depth]
    packed = _pack_codes(functional.pad(codes, (0, spec.depth - codes.shape[1])), spec.kind)
    codes_of(weight, spec)[first : first + len(codes)] = packed
    qparams = qparams_of(weight, spec)[:, first : first + len(codes)]
    if spec.kind.is_e2m1:
        exponents = functional.pad(fields["e"], (0, spec.qparams * 4 - spec.groups))
        qparams.copy_(exponents.view(len(codes), spec.qparams, 4).transpose(0, 1))
        return
    for i, name in enumerate(("scales", "offsets")[: qparams.shape[2]]):
        values = fields[name] if name in fields else fields["scales"] * (spec.kind.zero or 0)
        qparams[:, :, i] = values.to(weight.device, qparams.dtype).T


def fields_of_rows(weight: Tensor, spec: PackedSpec, rows: slice | Tensor = slice(None)) -> dict[str, Tensor]:
    """What was packed of some features, without what fills the last k tile; codes as far as scales reach."""
    kind = spec.kind
    if not kind.is_quantised:
        return {"weight": codes_of(weight, spec)[rows, spec.k_offset : spec.k_offset + spec.inputs]}
    depth = spec.blocks * spec.block
    codes = _unpack_codes(codes_of(weight, spec)[rows], kind)[:, :depth]
    fields = {"codes": functional.pad(codes, (0, depth - codes.shape[1]))}
    qparams = qparams_of(weight, spec)[:, rows]
    if kind.is_e2m1:
        exponents = qparams.transpose(0, 1).flatten(1)[:, : spec.groups].int() - 128
        return fields | {"scales": torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)}
    fields["scales"] = qparams[:, :, 0].T
    return fields if kind.zero is not None else fields | {"offsets": qparams[:, :, 1].T}


def _pack_codes(codes: Tensor, kind: Format) -> Tensor:
    """[rows, depth] → [rows, bytes]."""
    rows, bits = len(codes), kind.bits
    chunks = codes.view(rows, -1, 16 // bits, 4, 8).transpose(2, 3)
    if bits == 8:
        return chunks.reshape(rows, -1) ^ _lack(kind)
    pairs = chunks.reshape(rows, -1, 2, 2, 2)  # of 8 codes: [half of the four pairs][pair][of a pair]
    return (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).transpose(2, 3).reshape(rows, -1)


def _unpack_codes(packed: Tensor, kind: Format) -> Tensor:
    """The inverse of `_pack_codes`."""
    rows, bits = len(packed), kind.bits
    if bits == 4:
        halves = packed.view(rows, -1, 2, 2).transpose(2, 3)
        packed = torch.stack((halves & 15, halves >> 4), 3)
    else:
        packed = packed ^ _lack(kind)
    return packed.reshape(rows, -1, 4, 16 // bits, 8).transpose(2, 3).reshape(rows, -1)


def _lack(kind: Format) -> int:
    """What 8 bits are changed by."""
    return 0 if kind.is_e4m3 else 128
