"""What the engine asks of a model and its caches; `allspan.worker` has the real ones, tests bring small ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from allspan.worker.scheduler.plan import Copy
from allspan.worker.step.inputs import StepInputs


class StepModel(Protocol):
    """A loaded model whose cache is bound."""

    @property
    def vocab_widths(self) -> tuple[int, ...]:
        """Columns of each rank's logits; together the vocabulary."""

    @property
    def max_model_len(self) -> int: ...

    def forward(self, inputs: StepInputs) -> Tensor:
        """This rank's slice of the logits, float32 [m, vocab_widths[rank]]; may be overwritten until the next call."""


class PageTiers(Protocol):
    """The device's pages and those of host memory; `allspan.worker.cache.tiers` has the real ones."""

    num_host_pages: int
    """The same on every rank."""

    def copy(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Device → host, then host → device, each in its order."""
