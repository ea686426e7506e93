"""Filling packed weights in plain torch; `allspan.kernels.packing.Packer` says what each does.

`first` counts panels: rows go to the part's panel `first` and on. Rows that do not fill the last panel are zeros there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from allspan.kernels.packed import FEATURES, FORMATS, PackedSpec

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
"""Of a row's blocks in a GGUF file, by the format they are packed into (group4: Q4_1); they hold as many inputs."""


def pack_floats(values: Tensor, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """values [rows, inputs]."""
    padded = _padded(values, spec)
    if spec.format == "f32":
        ordered = _cut(padded, 2, (spec.blocks, 32)).permute(0, 2, 3, 1)
    else:
        ordered = _cut(padded, 2, (spec.blocks, 16, 2)).permute(0, 2, 3, 1, 4)
    _store(_bytes(ordered).flatten(1), weight, spec, part, first)


def pack_quantised(values: Tensor, before: int, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """values float32 [rows, inputs of this rank and others], from `before` inputs before this rank's first."""
    most = (1 << FORMATS[spec.format].bits) - 1
    columns = values.shape[1]
    group = spec.group or max(1, columns)
    grouped = _cut(torch.nn.functional.pad(values, (0, -columns % group)), 1, (-1, group))
    inside = torch.arange(grouped.shape[1] * group).view(1, -1, group) < columns
    least = grouped.masked_fill(~inside, torch.inf).amin(2)
    scale = (grouped.masked_fill(~inside, -torch.inf).amax(2) - least) / most
    scale = scale + (grouped * 0).sum(2)  # NaN for a NaN or an infinity among them
    scale[scale == 0] = 1.0
    offset = -least
    if spec.group:
        scale, offset = scale.clamp(min=2.0**-24).half().float(), offset.half().float()
    code = ((grouped + offset[:, :, None]) / scale[:, :, None]).clamp(0, most).round().nan_to_num(0.0)
    codes = (code * inside).to(torch.uint8).flatten(1)
    codes = codes[:, :columns] if spec.group else codes[:, before : before + spec.inputs]
    if spec.group:
        scales = torch.stack((_by_feature(scale), _by_feature(offset)), 2).half()  # [panels, blocks, 2, 16]
        _store(_blocks(spec, _bytes(scales), codes), weight, spec, part, first)
    else:
        head = torch.stack((_by_feature(scale), _by_feature(offset)), 2)
        blocks = _blocks(spec, torch.empty(0, dtype=torch.uint8), codes)
        _store(torch.cat((_bytes(head).flatten(1), blocks), 1), weight, spec, part, first)


def pack_blocks(blocks: Tensor, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    """uint8 [rows, bytes]: blocks of a GGUF file."""
    raw = _cut(blocks, 1, (spec.blocks, -1))
    scales, codes = _DECODERS[spec.format](raw)
    _store(_blocks(spec, scales, codes.flatten(1)), weight, spec, part, first)


def _halves(raw: Tensor) -> Tensor:
    """codes [..., 2 n] of bytes [..., n]: all low halves, then all high ones."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _q8_0(raw: Tensor) -> tuple[Tensor, Tensor]:
    return _by_feature(raw[..., :2]), raw[..., 2:] ^ 128


def _q4_0(raw: Tensor) -> tuple[Tensor, Tensor]:
    return _by_feature(raw[..., :2]), _halves(raw[..., 2:])


def _q4_1(raw: Tensor) -> tuple[Tensor, Tensor]:
    return _scale_and_offset(raw), _halves(raw[..., 4:])


def _q5_0(raw: Tensor) -> tuple[Tensor, Tensor]:
    return _by_feature(raw[..., :2]), _halves(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4


def _q5_1(raw: Tensor) -> tuple[Tensor, Tensor]:
    return _scale_and_offset(raw), _halves(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4


def _q4_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    return _super_scales(raw), _halves(_cut(raw[..., 16:], -1, (4, 32))).flatten(-2)


def _q5_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    low = _cut(_halves(_cut(raw[..., 48:], -1, (4, 32))), -1, (2, 32)).flatten(-3, -2)
    groups = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = raw[..., None, 16:48] >> groups & 1
    return _super_scales(raw), (low | high << 4).flatten(-2)


def _q6_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    low = _halves(_cut(raw[..., :128], -1, (2, 64)))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (_cut(raw[..., 128:192], -1, (2, 1, 32)) >> shifts & 3).flatten(-2)
    scales = torch.cat((_by_feature(raw[..., 208:210]).flatten(2), _by_group(raw[..., 192:208]).flatten(2)), -1)
    return scales, (low | high << 4).flatten(-2)


_DECODERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "group4": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
"""Blocks uint8 [rows, blocks, bytes] → the blocks' scales as they lie in a panel, and codes [rows, blocks, inputs]."""


def _bits(raw: Tensor) -> Tensor:
    """[..., 32] of little-endian words of four bytes."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _scale_and_offset(raw: Tensor) -> Tensor:
    """float16 d and m at the start of a block; the offset is -m."""
    least = raw[..., 2:4].clone()
    least[..., 1] ^= 128
    return torch.cat((_by_feature(raw[..., :2]).flatten(2), _by_feature(least).flatten(2)), -1)


def _super_scales(raw: Tensor) -> Tensor:
    """float16 d and dmin, then 8 scales and 8 minima of 6 bits in 12 bytes; here a byte each."""
    low, middle, last = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((low & 63, last & 15 | low >> 6 << 4), -1)
    mins = torch.cat((middle & 63, last >> 4 | middle >> 6 << 4), -1)
    parts = (_by_feature(raw[..., :2]), _by_feature(raw[..., 2:4]), *(_by_group(each) for each in (scales, mins)))
    return torch.cat([each.flatten(2) for each in parts], -1)


def _cut(values: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """One dimension as several; one of the sizes may be -1."""
    dim %= values.ndim
    return values.reshape(*values.shape[:dim], *sizes, *values.shape[dim + 1 :])


def _padded(values: Tensor, spec: PackedSpec) -> Tensor:
    """[panels, 16, depth], with zeros for what is missing."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, spec.blocks * spec.block - columns, 0, -rows % FEATURES))
    return _cut(padded, 0, (-1, FEATURES))


def _by_feature(values: Tensor) -> Tensor:
    """[rows, blocks, …] → [panels, blocks, 16, …], with zeros for rows that are missing."""
    missing = values.new_zeros((-len(values) % FEATURES, *values.shape[1:]))
    return _cut(torch.cat((values, missing)), 0, (-1, FEATURES)).transpose(1, 2)


def _by_group(values: Tensor) -> Tensor:
    """uint8 [rows, blocks, groups] → [panels, blocks, groups, 16]."""
    return _by_feature(values).transpose(2, 3)


def _bytes(values: Tensor) -> Tensor:
    """[panels, bytes…] of what lies there in order."""
    return values.contiguous().view(torch.uint8)


def _blocks(spec: PackedSpec, scales: Tensor, codes: Tensor) -> Tensor:
    """Blocks of panels, uint8 [panels, bytes]: their scales [panels, blocks, …], and codes [rows, inputs]."""
    panels = _cut(_padded(codes, spec), 2, (spec.blocks, spec.block // 32, 8, 4))
    quads = panels.permute(0, 2, 3, 4, 1, 5).flatten(4)  # [panels, blocks, groups, 8 quads, 16 features x 4]
    laid = _LAID[FORMATS[spec.format].bits](quads).flatten(2)
    if scales.numel():
        laid = torch.cat((scales.flatten(2), laid), -1)
    return laid.flatten(1)


def _laid8(quads: Tensor) -> Tensor:
    return quads.flatten(3)


def _laid4(quads: Tensor) -> Tensor:
    return (quads[..., :4, :] & 15 | quads[..., 4:, :] << 4).flatten(3)


def _laid5(quads: Tensor) -> Tensor:
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    bits = (_cut((quads >> 4 & 1), -1, (8, 8)) * weights).sum(-1, dtype=torch.uint8)
    return torch.cat((_laid4(quads), bits.flatten(3)), -1)


def _laid6(quads: Tensor) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    bits = (_cut((quads >> 4), -2, (2, 4)) << shifts).sum(-2, dtype=torch.uint8)
    return torch.cat((_laid4(quads), bits.flatten(3)), -1)


_LAID = {8: _laid8, 4: _laid4, 5: _laid5, 6: _laid6}


def _store(panels: Tensor, weight: Tensor, spec: PackedSpec, part: int, first: int) -> None:
    numbers = torch.arange(first, first + len(panels))
    if spec.interleaved:
        numbers = 2 * numbers + part
    else:
        numbers += sum(-(-each // FEATURES) for each in spec.parts[:part])
    weight[numbers] = panels
