"""LinearMethod: how the weight of a linear layer is held and applied. The model does not depend on which."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.weights.held_tensor import HeldTensor


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What this rank holds of a linear layer whose weight is several checkpoint tensors, one below the other."""

    parts: tuple[int, ...]
    """Output features of each part."""
    inputs: range
    """This rank's input features, counted in the whole layer."""
    all_inputs: int
    """Input features of the whole layer: what shares a scale may reach beyond this rank's."""
    has_bias: bool = False
    interleaved: bool = False
    """Two parts of one size (gate and up) whose features may lie side by side."""
    is_vocabulary: bool = False
    """The embedding, or the head that makes logits: InstantQuant leaves them in the weights' dtype."""
    is_head: bool = False
    """The head, or an embedding that is tied to it."""
    stored: tuple[str, ...] = ()
    """The type of each part in a quantised checkpoint, a GGUF file ("Q4_K") or another ("fp8/128"); else empty."""
    memory: str = "panels"
    """How packed weights lie: "panels", or "rows" for the kernels of a GPU."""

    @property
    def outputs(self) -> int:
        return sum(self.parts)


class Source(Protocol):
    """The checkpoint's tensors of one linear layer. Rows count from this rank's first of the part; `inputs` are those
    of the whole layer, and may be other ranks'."""

    def bias(self, part: int, out: Tensor) -> None:
        """This rank's slice of the part's bias into `out` [rows]."""

    def floats(self, part: int, rows: range, inputs: range, out: Tensor) -> None:
        """Into `out` [rows, inputs], float32, bfloat16 or float16."""

    def blocks(self, part: int, rows: range, inputs: range) -> Tensor:
        """Returns part of a matrix as a GGUF file holds it: uint8 [rows, bytes], the whole blocks of its type that hold
        these inputs."""

    def fields(self, part: int, rows: range, inputs: range, device: torch.device) -> Mapping[str, Tensor]:
        """On `device`: as other quantised checkpoints hold them: codes, scales and offsets, as
        `allspan.kernels.reference.packed_linear` has them. `inputs` begin with a group."""

    def order(self, part: int) -> Tensor:
        """int32 [inputs]: those of the whole layer, in the order in which `fields` has them."""


class Epilogue(enum.Enum):
    """What becomes of a product."""

    STORE = "out = product"
    ADD = "out += product"
    GATED_SILU = "out = silu(first part) · second part"
    GATED_GELU_TANH = "out = gelu_tanh(first part) · second part"
    GATED_CLAMPED = "out = clamped_swiglu of both parts"

    @property
    def activation(self) -> str:
        """The activation of a gated product, one of `allspan.kernels.ops.ACTIVATIONS`; else empty."""
        return next((name for name, epilogue in GATED.items() if epilogue is self), "")

    def finish(self, program: ProgramBuilder, product: Slot, out: Slot) -> None:
        """Appends the op that makes `out` of a product in a buffer of its own."""
        if self is Epilogue.ADD:
            program.op("add", product, out)
        else:
            program.op("gated_mul", product, self.activation, out)


GATED = {
    "silu": Epilogue.GATED_SILU,
    "gelu_tanh": Epilogue.GATED_GELU_TANH,
    "clamped_swiglu": Epilogue.GATED_CLAMPED,
}
"""Epilogues by activation."""


class LinearDelta(Protocol):
    """What adapters add to the products of linear layers, whichever method holds the weights."""

    @property
    def num_slots(self) -> int:
        """Adapters that there is room for."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What its ops read, by slot name, on the model's device."""

    def has(self, layer: str) -> bool:
        """Whether it adds to this layer, named as its piece ("layers.3.qkv")."""

    def shrink(self, program: ProgramBuilder, layer: str, x: Slot) -> Slot:
        """Appends the ops that make of x, row by row, the few numbers of which `expand` makes a delta. x has this
        rank's inputs, in a row for each of the step's tokens, or of those that the rank attends for alone, or, past the
        last attention, for each of its rows of logits. It comes before the layer's own product, which may meanwhile ask
        for its weight."""

    def embed(self, program: ProgramBuilder, layer: str, ids: Slot, first_row: int) -> Slot:
        """Appends the ops that make the same of the ids of a step's tokens, for the embedding: zeros for those that
        have no row on this rank, whose first one is `first_row`."""

    def expand(self, program: ProgramBuilder, layer: str, low: Slot, product: Slot) -> None:
        """Appends the ops of product += delta, before the activation. `low` is what `shrink` returned."""


class LinearMethod(Protocol):
    """A row of `allspan.worker.quant.table.METHODS`. `weights` are the slots of the held tensors, by suffix."""

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        """What the layer holds, by suffix. Biases, "bias" or "bias.0", "bias.1" …, are float32, one after the other
        those of all outputs."""

    def load(self, shape: LinearShape, source: Source, held: Mapping[str, Tensor], packer: Packer) -> None:
        """Fills the tensors that `tensors` declared, on the CPU."""

    def emit(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        """Appends the ops of product = x · weightᵀ (+ bias), and what the epilogue says."""

    def emit_embedding(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        ids: Slot,
        first_row: int,
        out: Slot,
    ) -> None:
        """Appends the ops of out = weight[ids - first_row], 0 for another rank's row; asked of the embedding alone."""
