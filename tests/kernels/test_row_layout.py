"""Packed weights in rows: the same numbers as in panels, where the page in row_layout.py says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from allspan.kernels.packed_spec import FORMATS, ROW_FORMATS, PackedSpec
from allspan.kernels.packer import Packer, Target
from allspan.kernels.reference import packed_linear
from allspan.kernels.row_layout import codes_of
from support.packed_cases import QUANTISED, activations_of, random_fields

IN_ROWS = [name for name in ROW_FORMATS if name in FORMATS]


def specs(name: str) -> list[PackedSpec]:
    """Of panels."""
    kind, activation = FORMATS[name], activations_of(name)[0]
    group = 96 if kind.block == 0 else 0
    k_offset = 19 if kind.scale_bytes else 0
    return [
        PackedSpec(name, activation, (40,), 300, group=group),
        PackedSpec(name, activation, (5, 33, 16), 201, k_offset=k_offset, group=group),
        PackedSpec(name, activation, (20, 20), 33, group=group, interleaved=True),
        PackedSpec(name, activation, (3,), 128, group=group),
    ]


def in_rows(spec: PackedSpec) -> PackedSpec:
    return replace(spec, memory="rows", interleaved=False)


@pytest.mark.parametrize("name", IN_ROWS)
def test_rows_hold_the_qparams_of_panels(name: str) -> None:
    for spec in specs(name):
        fields = random_fields(spec)
        weight = packed_linear.pack(in_rows(spec), fields)
        assert weight.shape == in_rows(spec).shape
        assert torch.equal(
            packed_linear.unpack(weight, in_rows(spec)), packed_linear.unpack(packed_linear.pack(spec, fields), spec)
        )


def code_of(data: bytes, bits: int, i: int) -> int:
    """Code i of a feature, read as the page in row_layout.py says."""
    inputs = 512 // bits
    k_tile, within = divmod(i, inputs)
    group, chunk, place = within // 32, within % 32 // 8, within % 8
    start = k_tile * 64 + chunk * 16 + group * bits
    if bits == 8:
        return data[start + place] ^ 128
    word = int.from_bytes(data[start : start + 4], "little")
    return word >> (place // 2 * 4 + place % 2 * 16) & 15


@pytest.mark.parametrize("name", [name for name in QUANTISED if name in ROW_FORMATS])
def test_codes_are_where_the_page_says(name: str) -> None:
    spec = PackedSpec(name, "a8", (3,), 200, group=0 if FORMATS[name].block else 64, memory="rows")
    fields = random_fields(spec)
    codes = codes_of(packed_linear.pack(spec, fields), spec)
    for feature in range(3):
        data = bytes(codes[feature].tolist())
        found = [code_of(data, FORMATS[name].bits, i) for i in range(200)]
        assert found == fields["codes"][feature, :200].tolist()


@pytest.mark.parametrize("name", ["bf16", "channel8", "channel4", "group8", "group4"])
def test_the_packer_fills_rows_of_several_parts_in_several_goes(name: str) -> None:
    """With the qparams that it fills panels with."""
    group = 64 if name.startswith("group") else 0
    spec = PackedSpec(
        name, "bf16" if name == "bf16" else "a16", (35, 21), 150, k_offset=22 if group else 0, group=group
    )
    values = torch.randn((56, 172 if group else 150), generator=torch.Generator().manual_seed(1)) * 0.1
    weights = {each: torch.full(each.shape, 255, dtype=torch.uint8) for each in (spec, in_rows(spec))}
    for each, weight in weights.items():
        for part, start, stop in ((0, 0, 16), (0, 16, 35), (1, 0, 21)):
            rows = values[part * 35 + start : part * 35 + stop].contiguous()
            target = Target(each, part, start, weight)
            if name == "bf16":
                Packer().floats(rows.bfloat16(), target)
            else:
                Packer().quantise(rows, spec.k_offset, target)
    in_panels, rows = (packed_linear.unpack(weight, each) for each, weight in weights.items())
    assert torch.equal(in_panels, rows)
    assert not rows.isnan().any()


def test_e4m3_numbers_are_off_by_a_sixteenth_at_most() -> None:
    """A rank's slice of the inputs has the scale of all; what is not finite says so."""
    values = torch.randn((21, 700), generator=torch.Generator().manual_seed(1)) * 0.1
    values[3], values[4, 5] = 0.0, torch.inf
    spec = PackedSpec("fp8", "e4m3", (21,), 300, memory="rows")
    weight = torch.full(spec.shape, 255, dtype=torch.uint8)
    Packer().quantise(values, 200, Target(spec, 0, 0, weight))
    found, expected = packed_linear.unpack(weight, spec), values[:, 200:500]
    assert found[4].isnan().all()
    rows = [row for row in range(21) if row != 4]
    least = values[rows].abs().amax(1, keepdim=True) / 448 * 2**-10
    assert ((found - expected)[rows].abs() <= expected[rows].abs() / 16 + least).all()


@pytest.mark.parametrize("name", IN_ROWS)
def test_products_with_rows_are_those_with_panels(name: str) -> None:
    for spec in specs(name):
        fields = random_fields(spec)
        x = torch.randn((3, spec.inputs), generator=torch.Generator().manual_seed(2))
        bias = torch.randn(spec.features)
        results = []
        for each in (spec, in_rows(spec)):
            weight, out = packed_linear.pack(each, fields), torch.zeros(3, spec.features + 2)
            packed_linear.packed_linear(x, weight, bias, each, 1, out)
            packed_linear.packed_linear_add(x, weight, None, each, 2, out)
            results.append(out)
            if len(spec.parts) == 1:
                looked_up = torch.full((3, spec.inputs), torch.nan)
                packed_linear.packed_embedding(torch.tensor([1, 5, 900]), weight, each, 3, looked_up)
                results[-1] = torch.cat((out.flatten(), looked_up.flatten()))
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
