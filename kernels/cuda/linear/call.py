"""One call of a packed linear op: its tensors, where the product goes and what is done with it there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.cuda.jit.modules import Gpu, gpu
from allspan.kernels.packed_spec import PackedSpec

STORE, ADD, GATED_SILU, GATED_GELU_TANH, GATED_CLAMPED = 0, 1, 2, 3, 4
"""Epilogues: out = product; out += product; out = activation(first half of the features) · second half."""
GATED = {"silu": GATED_SILU, "gelu_tanh": GATED_GELU_TANH, "clamped_swiglu": GATED_CLAMPED}
"""Epilogues by activation."""


@dataclass(frozen=True, slots=True)
class Output:
    """The columns of `out` that a product is written to, from `column` on, and its epilogue."""

    out: Tensor
    column: int
    epilogue: int

    @property
    def is_gated(self) -> bool:
        return self.epilogue in GATED.values()

    def width(self, spec: PackedSpec) -> int:
        """Returns the number of columns that the op writes."""
        return spec.parts[0] if self.is_gated else spec.features

    def view(self, spec: PackedSpec) -> Tensor:
        """Returns out[:, column : column + width]."""
        return self.out[:, self.column : self.column + self.width(spec)]


@dataclass(frozen=True, slots=True)
class OneRowAdapter:
    """What a low-rank adapter adds to a product of one row within its kernel: see one_row.cuh."""

    argument: bytes
    """The kernel's parameter."""
    sums: int
    """Numbers whose sums a rank's are: parts of the layer · parts of the inputs."""


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The arguments of a packed linear op: x [n, inputs] bfloat16 or float16, weight uint8 of spec.shape in rows, bias
    float32 [features] or None. Only `skinny` takes an adapter."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    spec: PackedSpec
    output: Output
    adapter: OneRowAdapter | None = None

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def gpu(self) -> Gpu:
        return gpu(self.x.device)

    def padded_x(self) -> Tensor:
        """Returns x with `k_offset` zeros before it, in rows of whole 16 bytes that begin at a multiple of 16."""
        spec, x = self.spec, self.x
        if spec.k_offset or spec.inputs % 8 or x.data_ptr() % 16:
            return functional.pad(x, (spec.k_offset, -(spec.k_offset + spec.inputs) % 8))
        return x


def is_float(out: Tensor) -> int:
    """Returns 1 where `out` is float32, 0 where it is of 16 bits, as kernels take it."""
    return int(out.dtype == torch.float32)


def check_weight(weight: Tensor, spec: PackedSpec) -> None:
    """Raises ValueError unless `weight` is a packed weight of `spec` in rows."""
    if weight.dtype != torch.uint8 or tuple(weight.shape) != spec.shape or not weight.is_contiguous():
        raise ValueError(f"weight: {weight.dtype} {list(weight.shape)} is not what {spec} says")
    if spec.memory != "rows":
        raise ValueError(f"weight: lies in {spec.memory}, the kernels of a GPU take rows")
