"""Random packed weights of any spec, and the specs that tests go through."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from allspan.kernels.packed_spec import FORMATS, PackedSpec
from allspan.kernels.reference.packed_linear import FIELDS, Fields, pack

GGUF_ONLY = (
    *("q3_k", "q2_k", "iq4_nl", "mxfp4", "iq4_xs"),
    *("iq3_s", "iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s"),
)
"""Formats that no other checkpoint has, for inputs of 8 bits alone."""

QUANTISED = tuple(name for name, kind in FORMATS.items() if kind.is_quantised)


def activations_of(name: str) -> tuple[str, ...]:
    """What a format's input can be turned into."""
    if name.startswith("fp8"):
        return ("e4m3",)
    if not FORMATS[name].is_quantised:
        return (name,)
    return ("a8",) if name in GGUF_ONLY else ("a8", "a16")


def random_fields(spec: PackedSpec, seed: int = 0) -> Fields:
    """What weights are made of, at random; weights are about 1 / sqrt(inputs) large."""
    generator = torch.Generator().manual_seed(seed + 31 * spec.features + spec.inputs)
    kind, size = spec.kind, max(1, spec.inputs) ** -0.5
    if not kind.is_quantised:
        return {"weight": torch.randn(spec.features, spec.inputs, generator=generator) * size}
    largest = max(map(abs, kind.values), default=(1 << kind.bits) // 2) * kind.step
    depth = spec.blocks * spec.block
    fields = {"codes": torch.randint(0, 1 << kind.bits, (spec.features, depth), generator=generator).to(torch.uint8)}
    step = 2 * size / largest
    if kind.is_e4m3:
        fields["codes"][fields["codes"] & 0x7F == 0x7F] = 0x80  # no NaN
    for field in FIELDS[spec.format]:
        shape = spec.features, field.count * (1 if kind.head_bytes else spec.blocks)
        near_one = torch.rand(shape, generator=generator) + 0.5
        if field.dtype == torch.int8:
            fields[field.name] = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        elif field.name == "e":
            middle = round(math.log2(step))
            fields[field.name] = torch.randint(middle + 127, middle + 130, shape, generator=generator).to(torch.uint8)
        elif field.name == "sm":
            fields[field.name] = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        elif field.dtype == torch.uint8:
            fields[field.name] = torch.randint(0, 64, shape, generator=generator).to(torch.uint8)
        else:
            middle = (1 << kind.bits) / 2 if field.name in ("offsets", "dmin") else 1.0
            per_group = 1 / 64 if field.name in ("d", "dmin") else 1.0
            fields[field.name] = (near_one * step * middle * per_group).to(field.dtype)
    return fields


def random_weight(spec: PackedSpec, seed: int = 0) -> Tensor:
    """A packed weight, uint8 of `spec.shape`."""
    return pack(spec, random_fields(spec, seed))
