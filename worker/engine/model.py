"""What the engine asks of a model; `allspan.worker.models` has the real one, tests bring a small one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from allspan.worker.models.inputs import StepInputs


class StepModel(Protocol):
    """A loaded model whose cache is bound."""

    @property
    def vocab_widths(self) -> tuple[int, ...]:
        """Columns of each rank's logits; together the vocabulary."""

    @property
    def max_model_len(self) -> int: ...

    def forward(self, inputs: StepInputs) -> Tensor:
        """This rank's slice of the logits, float32 [m, vocab_widths[rank]]; may be overwritten until the next call."""
