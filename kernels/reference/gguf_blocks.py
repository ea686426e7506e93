"""Blocks of GGUF files in plain torch: what they are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from allspan.kernels.reference.packed_linear import Fields

GGUF_BLOCK_BYTES = {
    "q8_0": 34,
    "q4_0": 18,
    "group4": 20,
    "q5_0": 22,
    "q5_1": 24,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
    "q3_k": 110,
    "q2_k": 84,
    "iq4_nl": 18,
    "mxfp4": 17,
    "iq4_xs": 136,
    "iq3_s": 110,
    "iq3_xxs": 98,
    "iq2_xxs": 66,
    "iq2_xs": 74,
    "iq2_s": 82,
}
"""Bytes of a block of a row in a GGUF file, by the format it is packed into (group4: Q4_1)."""


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


def _q3_k(raw: Tensor) -> Fields:
    high = raw[..., None, :32] >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    low, top = _nibbles(raw[..., 96:104], 1), _pairs(raw[..., 104:108])
    scales = (low | top << 4).view(torch.int8) - 32
    return {"d": _float16(raw, 108), "s": scales, "codes": _in_128s(raw[..., 32:96]) | high.flatten(-2) << 2}


def _q2_k(raw: Tensor) -> Fields:
    return {
        "d": _float16(raw, 80),
        "dmin": _float16(raw, 82),
        "sm": raw[..., :16],
        "codes": _in_128s(raw[..., 16:80]),
    }


def _mxfp4(raw: Tensor) -> Fields:
    return {"e": raw[..., :1], "codes": _halves(raw[..., 1:])}


def _iq4_xs(raw: Tensor) -> Fields:
    high = (raw[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(-2)
    scales = (_nibbles(raw[..., 4:8], 2) | high << 4).view(torch.int8) - 32
    codes = _halves(raw[..., 8:].reshape(*raw.shape[:2], 8, 16)).flatten(-2)
    return {"d": _float16(raw, 0), "s": scales, "codes": codes}


def _iq3_s(raw: Tensor) -> Fields:
    numbers = raw[..., 2:66].int() | _bits(raw[..., 66:74]).int() << 8
    codes = _looked_up("iq3_s", numbers, _bits(raw[..., 74:106]), 3)
    return {"d": _float16(raw, 0), "s": _odd(_nibbles(raw[..., 106:], 2)), "codes": codes}


def _iq3_xxs(raw: Tensor) -> Fields:
    scales, signs = _scales_and_signs(raw[..., 66:].reshape(*raw.shape[:2], 8, 4))
    return {"d": _float16(raw, 0), "s": scales, "codes": _looked_up("iq3_xxs", raw[..., 2:66].int(), signs, 3)}


def _iq2_xxs(raw: Tensor) -> Fields:
    groups = raw[..., 2:].reshape(*raw.shape[:2], 8, 8)
    scales, signs = _scales_and_signs(groups[..., 4:])
    return {
        "d": _float16(raw, 0),
        "s": scales,
        "codes": _looked_up("iq2_xxs", groups[..., :4].flatten(-2).int(), signs, 2),
    }


def _iq2_xs(raw: Tensor) -> Fields:
    words = raw[..., 2:66:2].int() | raw[..., 3:66:2].int() << 8
    codes = _looked_up("iq2_xs", words & 511, _bits(_with_parity((words >> 9).to(torch.uint8))), 2)
    return {"d": _float16(raw, 0), "s": _odd(_nibbles(raw[..., 66:], 2)), "codes": codes}


def _iq2_s(raw: Tensor) -> Fields:
    high = (raw[..., 66:74, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(-2)
    codes = _looked_up("iq2_s", raw[..., 2:34].int() | high.int() << 8, _bits(raw[..., 34:66]), 2)
    return {"d": _float16(raw, 0), "s": _odd(_nibbles(raw[..., 74:], 2)), "codes": codes}


DECODERS: dict[str, Callable[[Tensor], Fields]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "group4": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q3_k": _q3_k,
    "q2_k": _q2_k,
    "iq4_nl": _q4_0,
    "mxfp4": _mxfp4,
    "iq4_xs": _iq4_xs,
    "iq3_s": _iq3_s,
    "iq3_xxs": _iq3_xxs,
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
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
    """[..., 8 n]: the bits of bytes [..., n], the lowest first."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _super_scales(raw: Tensor) -> dict[str, Tensor]:
    """d and dmin, then 8 scales and 8 minima of 6 bits in 12 bytes."""
    low, middle, last = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((low & 63, last & 15 | low >> 6 << 4), -1)
    mins = torch.cat((middle & 63, last >> 4 | middle >> 6 << 4), -1)
    return {"d": _float16(raw, 0), "dmin": _float16(raw, 2), "s": scales, "m": mins}


def _pairs(raw: Tensor) -> Tensor:
    """The pairs of bits of bytes [..., n], the lowest of all bytes first."""
    return torch.cat([raw >> shift & 3 for shift in (0, 2, 4, 6)], -1)


def _in_128s(raw: Tensor) -> Tensor:
    """Pairs of bits, for every 32 bytes on their own."""
    return _pairs(raw.reshape(*raw.shape[:2], 2, 32)).flatten(-2)


def _nibbles(raw: Tensor, dim: int) -> Tensor:
    """[..., 2 n] of bytes [..., n]: all low halves first (1), or each byte's two together (2)."""
    return _halves(raw) if dim == 1 else torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def _odd(scales: Tensor) -> Tensor:
    return (scales * 2 + 1).view(torch.int8)


def _with_parity(signs: Tensor) -> Tensor:
    """Seven signs of eight: the last one makes their number even."""
    parity = signs ^ signs >> 4
    parity ^= parity >> 2
    return signs | ((parity ^ parity >> 1) & 1) << 7


def _scales_and_signs(words: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., groups] and bits [..., 32 · groups] of little-endian words, [..., groups, 4 bytes]: four times seven
    signs, and then a scale."""
    whole = words.clone(memory_format=torch.contiguous_format).view(torch.int32)  # a lone block is a view of its bytes
    signs = whole >> torch.tensor([0, 7, 14, 21]) & 127
    scales = whole.squeeze(-1) >> 28 & 15
    return _odd(scales.to(torch.uint8)), _bits(_with_parity(signs.to(torch.uint8)).flatten(-2))


def _looked_up(format_name: str, numbers: Tensor, signs: Tensor, bits: int) -> Tensor:
    """Codes: the magnitudes at `numbers` of the type's table, and each one's sign in the bit above their `bits`."""
    return grid(format_name)[numbers].flatten(-2) | signs << bits


@functools.cache
def grid(format_name: str) -> Tensor:
    """The magnitudes that weights of a type have together, as codes: uint8 [entries, 8 or 4 weights]; of other formats
    than iq2 and iq3, none."""
    table = _GRIDS.get(format_name)
    if table is None:
        return torch.empty((0, 0), dtype=torch.uint8)
    table.init_grid()
    values = np.asarray(table.grid, dtype=np.int64).reshape(table.grid_shape)
    return torch.from_numpy(np.searchsorted(np.array(table.grid_map), values).astype(np.uint8))


_GRIDS: dict[str, Any] = {
    "iq3_s": gguf.quants.IQ3_S,
    "iq3_xxs": gguf.quants.IQ3_XXS,
    "iq2_xxs": gguf.quants.IQ2_XXS,
    "iq2_xs": gguf.quants.IQ2_XS,
    "iq2_s": gguf.quants.IQ2_S,
}
