"""Filling packed weights: every packer gives the same bytes, and what they mean is what was given."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest
import torch
from torch import Tensor

from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.packer import Packer, Target
from allspan.kernels.reference.packed_linear import fields_of, unpack
from allspan.kernels.table import backends, op_set
from support.gguf_blocks import random_blocks

KINDS = {
    "Q8_0": "q8_0",
    "Q4_0": "q4_0",
    "Q4_1": "group4",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "Q3_K": "q3_k",
    "Q2_K": "q2_k",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
    "IQ3_S": "iq3_s",
    "IQ3_XXS": "iq3_xxs",
    "IQ2_S": "iq2_s",
    "IQ2_XS": "iq2_xs",
    "IQ2_XXS": "iq2_xxs",
}
INSTANT = (("channel8", 0), ("channel4", 0), ("group8", 64), ("group4", 32), ("group4", 128), ("group8", 512))


def packers() -> list[Packer]:
    opened = [op_set(name, threads=2) for name in (backends()[0], "reference")]
    return [Packer(getattr(ops, "runtime", None)) for ops in opened]


def blocks_of(kind: str, rows: int, inputs: int) -> Tensor:
    return torch.from_numpy(random_blocks(gguf.GGMLQuantizationType[kind], rows, inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_gguf_file_mean_what_they_meant(kind: str) -> None:
    """A slice of the inputs, which begins and ends within blocks, of two interleaved parts given in two goes."""
    rows, start, stop = 21, 300, 900
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = blocks_of(kind, rows, 1024)
    expected = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))[:, start:stop]
    spec = PackedSpec(
        KINDS[kind], "a8", (rows, rows), stop - start, start % elements, 32 if kind == "Q4_1" else 0, True
    )
    given = raw[:, start // elements * size : -(-stop // elements) * size]
    for packer in packers():
        weight = torch.full(spec.shape, 255, dtype=torch.uint8)
        for part in (0, 1):
            for first in (0, 16):
                packer.blocks(given[first : first + 16].contiguous(), Target(spec, part, first, weight))
        assert torch.equal(unpack(weight, spec), torch.cat((expected, expected)))


@pytest.mark.parametrize(("name", "group"), INSTANT)
def test_a_quantised_weight_is_off_by_half_a_step_at_most(name: str, group: int) -> None:
    """And by what rounding scale and offset to float16 adds; a constant group is exact as far as float16 holds it."""
    values = torch.randn((21, 700), generator=torch.Generator().manual_seed(1)) * 0.1
    values[3], values[4], values[5, :200] = 0.5, 0.0, 1e-9
    start, inputs = 150, 301
    k_offset = start % group if group else 0
    spec = PackedSpec(name, "a16", (21,), inputs, k_offset, group)
    given = values[:, start - k_offset : start - k_offset + spec.blocks * group] if group else values
    for packer in packers():
        weight = torch.empty(spec.shape, dtype=torch.uint8)
        packer.quantise(given.contiguous(), k_offset if group else start, Target(spec, 0, 0, weight))
        fields = fields_of(weight, spec)
        step = fields["scales"].float()
        largest = values.abs().amax(1, keepdim=True)
        repeated = step.repeat_interleave(group, 1)[:, k_offset : k_offset + inputs] if group else step
        bound = repeated * 0.501 + (largest * 2.0**-10 if group else 1e-7)
        error = (unpack(weight, spec) - values[:, start : start + inputs]).abs()
        assert (error <= bound).all()
        assert error[3:5].max() == 0


def test_a_channel_of_8_bits_holds_zero_exactly() -> None:
    """Inputs can be a thousand times as large as others: features that ignore them must go on doing so."""
    values = torch.randn((20, 300), generator=torch.Generator().manual_seed(3)) + 0.7
    values[:, ::7] = 0.0
    spec = PackedSpec("channel8", "a16", (20,), 300)
    for packer in packers():
        weight = torch.empty(spec.shape, dtype=torch.uint8)
        packer.quantise(values, 0, Target(spec, 0, 0, weight))
        assert (unpack(weight, spec)[:, ::7] == 0.0).all()


@pytest.mark.parametrize(("name", "group"), INSTANT)
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e6])
def test_every_packer_gives_the_same_bytes(name: str, group: int, size: float) -> None:
    values = torch.randn((53, 700), generator=torch.Generator().manual_seed(2)) * size
    values[5, 7], values[6, 300] = torch.nan, torch.inf
    values[7] = torch.arange(700) % 15 + 0.5  # halves
    values[8] = -0.25
    spec = PackedSpec(name, "a16", (7, 53), 700 if group else 400, group=group)
    held = []
    for packer in packers():
        weight = torch.zeros(spec.shape, dtype=torch.uint8)
        packer.quantise(values, 0 if group else 200, Target(spec, 1, 0, weight))
        held.append(weight)
    for other in held[1:]:
        assert torch.equal(held[0], other)
    assert unpack(held[0], spec)[7 + 5].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_packer_gives_the_same_bytes_of_blocks(kind: str) -> None:
    """Panels that are full, and those that lack features, whose codes and scales are zeros."""
    opened = packers()
    for rows, inputs in ((1, 256), (16, 768), (53, 512)):
        raw = blocks_of(kind, rows, inputs)
        spec = PackedSpec(KINDS[kind], "a8", (7, rows), inputs, group=32 if kind == "Q4_1" else 0)
        held = []
        for packer in opened:
            weight = torch.zeros(spec.shape, dtype=torch.uint8)
            weight[1:] = 255
            packer.blocks(raw, Target(spec, 1, 0, weight))
            held.append(weight)
        assert all(torch.equal(held[0], other) for other in held)


@pytest.mark.parametrize(("name", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_floats_are_held_as_they_are(name: str, dtype: torch.dtype) -> None:
    for inputs in (1, 31, 100):
        values = torch.randn(35, inputs).to(dtype)
        spec = PackedSpec(name, name, (3, 35), inputs)
        for packer in packers():
            weight = torch.zeros(spec.shape, dtype=torch.uint8)
            packer.floats(values[:32], Target(spec, 1, 0, weight))
            packer.floats(values[32:], Target(spec, 1, 32, weight))
            assert torch.equal(unpack(weight, spec)[3:], values.float())


def test_what_does_not_fit_is_refused() -> None:
    spec = PackedSpec("group8", "a16", (40,), 100, 4, 64)
    weight = torch.zeros(spec.shape, dtype=torch.uint8)
    for packer in packers():
        with pytest.raises(ValueError, match="before: 3 does not fit"):
            packer.quantise(torch.zeros(16, 120), 3, Target(spec, 0, 0, weight))
        with pytest.raises(ValueError, match="from 32 on do not fit part 0"):
            packer.quantise(torch.zeros(16, 120), 4, Target(spec, 0, 32, weight))
        with pytest.raises(ValueError, match="ends within a panel"):
            packer.quantise(torch.zeros(17, 120), 4, Target(spec, 0, 0, weight))
        with pytest.raises(ValueError, match="is not what"):
            packer.quantise(torch.zeros(16, 120), 4, Target(replace(spec, inputs=90), 0, 0, weight[:, :9]))
