"""The layout of packed weights, written out byte by byte for a few, and its inverse."""

from __future__ import annotations

import struct

import pytest
import torch

from allspan.kernels.packed_spec import FORMATS, PackedSpec
from allspan.kernels.reference import packed_linear
from allspan.kernels.table import backends, op_set
from support.packed_cases import QUANTISED, activations_of, random_fields, random_weight


def specs(name: str) -> list[PackedSpec]:
    group = 96 if FORMATS[name].block == 0 else 0
    one = PackedSpec(name, activations_of(name)[0], (40,), 300, group=group)
    block = one.block
    return [
        one,
        PackedSpec(name, activations_of(name)[0], (5, 33, 16), 2 * block - 3, k_offset=block // 2 + 1, group=group),
        PackedSpec(name, activations_of(name)[0], (20, 20), 33, group=group, interleaved=True),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_pack_keeps_everything(name: str) -> None:
    for spec in specs(name):
        fields = random_fields(spec)
        weight = packed_linear.pack(spec, fields)
        assert weight.dtype == torch.uint8
        assert weight.shape == spec.shape
        back = packed_linear.fields_of(weight, spec)
        assert back.keys() == fields.keys()
        for key, values in fields.items():
            assert torch.equal(back[key], values.to(back[key].dtype)), key


def weight_of(data: bytes, bits: int, feature: int, i: int) -> int:
    """Code of an input i < 32 of a feature, read as the page in packed_spec.py says."""
    quad, place = divmod(i, 4)
    at = feature * 4 + place
    if bits == 8:
        return data[quad * 64 + at]
    if bits < 4:
        half, j = divmod(quad, 4)
        pair = data[half * 64 + at] >> (2 * j) & 3
        if bits == 2:
            return pair
        (mask,) = struct.unpack_from("<Q", data, 128 + quad * 8)
        return int(pair | (mask >> at & 1) << 2)
    low = data[quad % 4 * 64 + at] >> (4 if quad >= 4 else 0) & 15
    if bits == 5:
        (mask,) = struct.unpack_from("<Q", data, 256 + quad * 8)
        return int(low | (mask >> at & 1) << 4)
    if bits == 6:
        half, j = divmod(quad, 4)
        return int(low | (data[256 + half * 64 + at] >> (2 * j) & 3) << 4)
    return low


@pytest.mark.parametrize("name", QUANTISED)
def test_bytes_are_where_the_page_says(name: str) -> None:
    kind = FORMATS[name]
    spec = PackedSpec(name, "a8", (17,), 500, group=0 if kind.block else 64)
    fields = random_fields(spec)
    weight = packed_linear.pack(spec, fields)
    unpacked = packed_linear.unpack(weight, spec, torch.float64)
    group_bytes = 64 * kind.bits
    for feature, column in [(0, 0), (5, 499), (16, 31), (16, 257), (11, 100)]:
        panel, f = weight[feature // 16].numpy().tobytes(), feature % 16
        block, i = divmod(column, spec.block)
        begin = kind.head_bytes + block * spec.block_bytes
        codes = begin + kind.scale_bytes + i // 32 * group_bytes
        code = weight_of(panel[codes : codes + group_bytes], kind.bits, f, i % 32)
        if name in ("q4_k", "q5_k"):
            d, low = (struct.unpack_from("<e", panel, begin + at + 2 * f)[0] for at in (0, 32))
            s, m = (panel[begin + at + i // 32 * 16 + f] for at in (64, 192))
            value = code * d * s - low * m
        elif name == "q2_k":
            d, low = (struct.unpack_from("<e", panel, begin + at + 2 * f)[0] for at in (0, 32))
            sm = panel[begin + 64 + i // 16 * 16 + f]
            value = code * d * (sm & 15) - low * (sm >> 4)
        elif name == "mxfp4":
            value = kind.values[code] * 2.0 ** (panel[begin + f] - 128)
        elif kind.block == 256:
            group = 16 if kind.scale_bytes == 288 else 32
            (d,), s = struct.unpack_from("<e", panel, begin + 2 * f), panel[begin + 32 + i // group * 16 + f]
            number = kind.values[code] if kind.values else code - (kind.zero or 0)
            value = number * d * (s - 256 if s > 127 else s) * kind.step
        elif kind.head_bytes:
            scale, offset = (struct.unpack_from("<f", panel, at + 4 * f)[0] for at in (0, 64))
            value = code * scale - offset
        elif kind.zero is None:
            scale, offset = (struct.unpack_from("<e", panel, begin + at + 2 * f)[0] for at in (0, 32))
            value = code * scale - offset
        else:
            number = kind.values[code] if kind.values else code - kind.zero
            value = number * struct.unpack_from("<e", panel, begin + 2 * f)[0]
        assert unpacked[feature, column].item() == value


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_unpacked_weight(name: str) -> None:
    for spec in specs(name):
        for activation in activations_of(name):
            spec = PackedSpec(name, activation, spec.parts, spec.inputs, spec.k_offset, spec.group, spec.interleaved)
            weight, x = random_weight(spec), torch.randn(3, spec.inputs)
            bias, out = torch.randn(spec.features), torch.full((3, spec.features), float("nan"))
            packed_linear.packed_linear(x, weight, bias, spec, 0, out)
            exact = x.double() @ packed_linear.unpack(weight, spec).double().T + bias
            error = {"f32": 1e-6, "a16": 1e-4}.get(activation, 2e-2)
            torch.testing.assert_close(out.double(), exact, rtol=error, atol=error * 3)


def test_activations_are_whole_numbers_of_a_groups_scale() -> None:
    spec = PackedSpec("q8_0", "a8", (1,), 40, k_offset=24)
    x = torch.zeros(2, 40)
    x[0, 0], x[0, 7], x[0, 8] = 2.0, -1.0, 5.0
    x[1, 8], x[1, 39] = float("inf"), 1.0
    numbers, scales = packed_linear.quantise_activations(x, spec)
    assert numbers[0, [0, 7, 8]].tolist() == [127, -64, 127]
    assert scales[0, 7].item() == torch.tensor(2.0).div(127).item()
    assert scales[0, 8] == torch.tensor(5.0) / 127
    assert scales[1, :8].eq(0).all()
    assert scales[1, 8:].isnan().all()
    assert numbers[1].eq(0).all()


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_without_inputs_adds_nothing_but_the_bias(name: str, backend: str) -> None:
    spec = PackedSpec(name, activations_of(name)[0], (20,), 0, group=0 if FORMATS[name].block else 64)
    ops, bias = op_set(backend), torch.randn(20)
    for rows in (1, 3, 40):
        out = torch.full((rows, 20), float("nan"))
        ops.packed_linear(torch.empty(rows, 0), torch.zeros(spec.shape, dtype=torch.uint8), bias, spec, 0, out)
        assert out.equal(bias.expand(rows, 20))
