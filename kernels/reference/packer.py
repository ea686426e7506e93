"""Filling packed weights in plain torch; `allspan.kernels.packer.Packer` says what each does.

`first` counts panels: rows go to the part's panel `first` and on. Rows that do not fill the last panel are zeros there.
All of them work where their first argument lies, on the CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.packed_spec import FEATURES, PackedSpec
from allspan.kernels.reference.packed_linear import Fields, pack
from allspan.kernels.row_layout import pack_rows

GGUF_BLOCK_BYTES = {
    "q8_0": 34,
    "q4_0": 18,
    "group4": 20,
    "q5_0": 22,
    "q5_1": 24,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
}
"""Bytes of a block of a row in a GGUF file, by the format it is packed into (group4: Q4_1)."""


def pack_floats(values: Tensor, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """values [rows, inputs]."""
    pack_fields({"weight": values}, weight, spec, part, first)


def pack_quantised(values: Tensor, before: int, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """values float32 [rows, inputs of this rank and others], from `before` inputs before this rank's first."""
    most = (1 << spec.kind.bits) - 1
    columns = values.shape[1]
    if spec.kind.is_e4m3:
        _pack_e4m3(values, before, weight, spec, part, first)
        return
    group = spec.group or max(1, columns)
    grouped = functional.pad(values, (0, -columns % group)).reshape(len(values), -1, group)
    inside = torch.arange(grouped.shape[1] * group, device=values.device).view(1, -1, group) < columns
    least = grouped.masked_fill(~inside, torch.inf).amin(2, keepdim=True)
    scale = (grouped.masked_fill(~inside, -torch.inf).amax(2, keepdim=True) - least) / most
    constant = scale == 0
    scale[constant] = 1.0
    wrong = (grouped * 0).sum(2, keepdim=True).isnan()  # for a NaN or an infinity among them
    scale, offset = scale.masked_fill(wrong, torch.nan), (-least).masked_fill(wrong, torch.nan)
    if spec.format == "channel8":
        zero = (offset / scale).round()
        offset = torch.where((zero >= 0) & (zero <= most) & ~constant, zero * scale, offset)
    if spec.group:
        scale, offset = scale.clamp(min=2.0**-24).half().float(), offset.half().float()
    codes = ((grouped + offset) / scale).clamp(0, most).round().nan_to_num(0.0) * inside
    codes = codes.flatten(1)[:, before - spec.k_offset :]
    wanted = columns if spec.group else spec.inputs
    depth = spec.blocks * spec.block
    codes = functional.pad(codes[:, :wanted], (0, depth - wanted)).to(torch.uint8)
    pack_fields({"codes": codes, "scales": scale.flatten(1), "offsets": offset.flatten(1)}, weight, spec, part, first)


def _pack_e4m3(values: Tensor, before: int, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """scale = largest magnitude / 448, the largest e4m3 number; NaN for a NaN or an infinity."""
    group = spec.kind.block if spec.kind.scale_bytes else max(1, values.shape[1])
    grouped = functional.pad(values, (0, -values.shape[1] % group)).reshape(len(values), -1, group)
    largest = grouped.abs().amax(2, keepdim=True)
    if not spec.kind.scale_bytes and not values.shape[1]:
        grouped, largest = values.unsqueeze(1), values.new_zeros(len(values), 1, 1)
    scale = torch.where(largest.isfinite(), (largest / 448.0).clamp(min=2.0**-126), torch.nan)
    codes = (grouped / scale).nan_to_num(0.0).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    if not spec.kind.scale_bytes:
        codes = codes[:, before : before + spec.inputs]
    pack_fields({"codes": codes, "scales": scale.flatten(1)}, weight, spec, part, first)


def pack_blocks(blocks: Tensor, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """uint8 [rows, bytes]: blocks of a GGUF file."""
    fields = _DECODERS[spec.format](blocks.reshape(len(blocks), spec.blocks, -1))
    pack_fields({name: values.flatten(1) for name, values in fields.items()}, weight, spec, part, first)


def _q8_0(raw: Tensor) -> Fields:
    return {"scales": _float16(raw, 0), "codes": raw[..., 2:] ^ 128}


def _q4_0(raw: Tensor) -> Fields:
    return {"scales": _float16(raw, 0), "codes": _halves(raw[..., 2:])}


def _q4_1(raw: Tensor) -> Fields:
    return {"scales": _float16(raw, 0), "offsets": -_float16(raw, 2), "codes": _halves(raw[..., 4:])}


def _q5_0(raw: Tensor) -> Fields:
    return {"scales": _float16(raw, 0), "codes": _halves(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4}


def _q5_1(raw: Tensor) -> Fields:
    codes = _halves(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4
    return {"scales": _float16(raw, 0), "offsets": -_float16(raw, 2), "codes": codes}


def _q4_k(raw: Tensor) -> Fields:
    return {**_super_scales(raw), "codes": _in_64s(raw[..., 16:])}


def _q5_k(raw: Tensor) -> Fields:
    groups = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = raw[..., None, 16:48] >> groups & 1
    return {**_super_scales(raw), "codes": _in_64s(raw[..., 48:]) | high.flatten(-2) << 4}


def _q6_k(raw: Tensor) -> Fields:
    low = _halves(raw[..., :128].reshape(*raw.shape[:2], 2, 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = raw[..., 128:192].reshape(*raw.shape[:2], 2, 1, 32) >> shifts & 3
    codes = (low | high.flatten(-2) << 4).flatten(-2)
    return {"d": _float16(raw, 208), "s": raw[..., 192:208].contiguous().view(torch.int8), "codes": codes}


_DECODERS: dict[str, Callable[[Tensor], Fields]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "group4": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
"""Blocks uint8 [rows, blocks, bytes] → what they are made of, [rows, blocks, …]; the types are those of ggml."""


def _float16(raw: Tensor, at: int) -> Tensor:
    return raw[..., at : at + 2].contiguous().view(torch.float16)


def _halves(raw: Tensor) -> Tensor:
    """codes [..., 2 n] of bytes [..., n]: all low halves, then all high ones."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _in_64s(raw: Tensor) -> Tensor:
    """Halves, for every 32 bytes on their own."""
    return _halves(raw.reshape(*raw.shape[:2], 4, 32)).flatten(-2)


def _bits(raw: Tensor) -> Tensor:
    """[..., 32] of little-endian words of four bytes."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _super_scales(raw: Tensor) -> dict[str, Tensor]:
    """d and dmin, then 8 scales and 8 minima of 6 bits in 12 bytes."""
    low, middle, last = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((low & 63, last & 15 | low >> 6 << 4), -1)
    mins = torch.cat((middle & 63, last >> 4 | middle >> 6 << 4), -1)
    return {"d": _float16(raw, 0), "dmin": _float16(raw, 2), "s": scales, "m": mins}


def pack_fields(fields: Fields, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """fields [rows, …]."""
    rows = len(next(iter(fields.values())))
    if spec.memory == "rows":
        pack_rows(fields, weight, spec, sum(spec.parts[:part]) + first * FEATURES)
        return
    panels = pack(replace(spec, parts=(rows,), interleaved=False), fields)
    numbers = torch.arange(first, first + len(panels))
    if spec.interleaved:
        numbers = 2 * numbers + part
    else:
        numbers += sum(-(-each // FEATURES) for each in spec.parts[:part])
    weight[numbers] = panels
