"""What a request may ask of its logits before a token is drawn from them: one entry of PROCESSORS each, in this order:

    repetition penalty → presence and frequency penalties → biases → masks → grammar

Then the kernel draws: temperature → top-k → top-p → min-p → typical-p → the token. Each filter sees what the one before
it has left. Greedy rows take the largest logit that the processors have left. Log-probabilities are those of the
model's own logits, before all of this. When every token is masked the request fails (`failure`): none that was excluded
is ever sampled.

An entry makes a row's processor when the row joins, or None where the request does not ask; its state goes with the
row. A new one is a class with both halves (see `processor.py`) and its place in PENALTIES or MASKS, beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from allspan.worker.sampling.masks import MASKS
from allspan.worker.sampling.penalties import PENALTIES
from allspan.worker.sampling.processor import DeviceChange, LogitsProcessor, SamplingRow

PROCESSORS: tuple[Callable[[SamplingRow], LogitsProcessor | None], ...] = (
    *PENALTIES,
    *MASKS,
    lambda row: row.grammar,
)


def processors_of(row: SamplingRow) -> tuple[LogitsProcessor, ...]:
    """What the request asks for, in order; empty for most."""
    return tuple(processor for make in PROCESSORS if (processor := make(row)) is not None)


def device_change(row: SamplingRow, processors: Iterable[LogitsProcessor]) -> DeviceChange:
    """What the row's processors ask of a device."""
    change = DeviceChange(row.prompt_len, row.tokens)
    for processor in processors:
        processor.on_device(change)
    return change


def needs_tokens(processors: Iterable[LogitsProcessor]) -> bool:
    """Whether one of them must know the tokens before a position on the host."""
    return any(processor.needs_tokens for processor in processors)
