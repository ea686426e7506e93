"""Captures the steps of a GPU, one for each size that others are padded to, before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch

from allspan.worker.backend.cpu.step_inputs import InputBuffers
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers, chunk_buckets
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.model import StepModel

logger = logging.getLogger(__name__)


class GpuSteps(Protocol):
    """The steps of a GPU, to whoever gives its memory back between two of them."""

    def drain(self) -> None:
        """Waits until none is on its way. Raises DeadlineExceeded."""

    def capture(self) -> None:
        """Records them, where they are to be."""


class Capturing(Protocol):
    """A model on a GPU."""

    def capture(self, inputs: StepInputs) -> None:
        """Records the forward pass of a step that is all padding."""


def capture_steps(buffers: InputBuffers, model: StepModel, max_tokens: int, beat: Callable[[], None]) -> None:
    """`beat` is called after each step that was recorded. Nothing for buffers and models of another kind."""
    if not isinstance(buffers, DeviceBuffers):
        return
    captures = cast(Capturing, model)
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    buffers.chunks = chunk_buckets(max_tokens)
    for inputs in padded_steps(buffers):
        captures.capture(inputs)
        beat()
    torch.cuda.synchronize()
    logger.info(
        "captured decode steps of %d sizes (1 to %d rows; %d also for rows that share tokens) and steps with prompts "
        "of %d (to %d tokens) in %.1f s, %.2f GiB",
        len(buffers.buckets),
        buffers.buckets[-1],
        len(buffers.shared_buckets),
        len(buffers.chunks),
        buffers.chunks[-1],
        time.monotonic() - started,
        max(0, free - torch.cuda.mem_get_info()[0]) / 2**30,
    )


def padded_steps(buffers: DeviceBuffers) -> Iterator[StepInputs]:
    """All to which steps are padded, what needs most memory first."""
    for chunk in reversed(buffers.chunks):
        yield buffers.chunk_padding(chunk)
    for bucket in reversed(buffers.buckets):
        for is_shared in (False, True) if bucket in buffers.shared_buckets else (False,):
            yield buffers.padding(bucket, is_shared)
