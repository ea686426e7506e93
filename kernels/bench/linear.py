"""Products of few rows with weights of Qwen2.5-7B's shapes in every format, beside cuBLAS with bfloat16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.linear.packed_linear import kernel_name, packed_linear
from allspan.kernels.packed_spec import FORMATS, PackedSpec
from allspan.kernels.reference.packed_linear import unpack
from allspan.kernels.row_layout import codes_of, qparams_of

SHAPES = {
    "qkv": (3584, 4608),
    "o": (3584, 3584),
    "gate+up": (3584, 37888),
    "down": (18944, 3584),
    "lm_head": (3584, 152064),
}
"""Inputs and features."""
KINDS = {"bf16": ("bf16", 0), "int8": ("channel8", 0), "uint4": ("group4", 128)}


@dataclass(frozen=True)
class Shape:
    name: str
    inputs: int
    features: int
    rows: int
    kind: str

    @property
    def spec(self) -> PackedSpec:
        name, group = KINDS[self.kind]
        activation = "a16" if FORMATS[name].is_quantised else name
        return PackedSpec(name, activation, (self.features,), self.inputs, group=group, memory="rows")

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the weight, as it is held."""
        return self.spec.features * self.spec.row_bytes


def linear_cases() -> Iterator[Case]:
    for rows in (1, 4, 16):
        for name, (inputs, features) in SHAPES.items():
            for kind in KINDS:
                if name == "lm_head" and kind != "bf16":
                    continue
                shape = Shape(name, inputs, features, rows, kind)
                yield Case(
                    "linear",
                    f"{name} {inputs:,} to {features:,}, {rows} row{'s' * (rows > 1)}, {kind}",
                    partial(build, shape),
                    2 * shape.num_bytes,
                )


def build(shape: Shape, device: str) -> Built:
    sets = sets_for(shape.num_bytes)
    weights = [_random_weight(shape.spec, device) for _ in range(sets)]
    x = torch.randn(shape.rows, shape.inputs, dtype=torch.bfloat16, device=device)
    out = torch.empty(shape.rows, shape.features, dtype=torch.bfloat16, device=device)

    def ours(i: int) -> None:
        packed_linear(x, weights[i], None, shape.spec, 0, out)

    def check(name: str) -> None:
        out.fill_(float("nan"))
        ours(0)
        some = slice(0, 4096)  # of its features, so that a large weight is not unpacked as a whole
        right = x.float() @ _unpacked(weights[0], shape.spec, some).T
        torch.testing.assert_close(out[:, some].float(), right, rtol=1e-2, atol=2e-2)
        assert not out.isnan().any()

    def cublas() -> Launch:
        sized = Shape(shape.name, shape.inputs, shape.features, shape.rows, "bf16")
        plain = [
            torch.randn(shape.features, shape.inputs, dtype=torch.bfloat16, device=device)
            for _ in range(sets_for(sized.num_bytes))
        ]
        result = torch.empty_like(out)
        return lambda i: torch.mm(x, plain[i % len(plain)].T, out=result)

    return Built(
        {"allspan": ours},
        check,
        sets,
        shape.num_bytes + x.nbytes + out.nbytes,
        2 * shape.rows * shape.inputs * shape.features,
        {"cuBLAS bf16": cublas},
        kernel_name("packed_linear", x, weights[0], None, shape.spec, 0, out),
    )


def _random_weight(spec: PackedSpec, device: str) -> Tensor:
    weight = torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=device)
    if not FORMATS[spec.format].is_quantised:
        codes_of(weight, spec).normal_(std=spec.inputs**-0.5)
        return weight
    qparams = qparams_of(weight, spec)
    qparams[..., 0] = spec.inputs**-0.5 * 4 / (1 << FORMATS[spec.format].bits)
    qparams[..., 1] = 0
    return weight


def _unpacked(weight: Tensor, spec: PackedSpec, some: slice) -> Tensor:
    """float32 [features, inputs] of the first `some`."""
    if not FORMATS[spec.format].is_quantised:
        return codes_of(weight, spec)[some, : spec.inputs].float()
    return unpack(weight, spec, torch.float32)[some]
