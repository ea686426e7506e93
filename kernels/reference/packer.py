"""Filling packed weights in plain torch; `allspan.kernels.packer.Packer` says what each does.

`first` counts panels: rows go to the part's panel `first` and on. Rows that do not fill the last panel are zeros there.
All of them work where their first argument lies, on the CPU or a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.packed_spec import FEATURES, PackedSpec
from allspan.kernels.reference.gguf_blocks import DECODERS
from allspan.kernels.reference.packed_linear import Fields, pack
from allspan.kernels.row_layout import pack_rows


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
    fields = DECODERS[spec.format](blocks.reshape(len(blocks), spec.blocks, -1))
    pack_fields({name: values.flatten(1) for name, values in fields.items()}, weight, spec, part, first)


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
