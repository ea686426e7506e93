"""Captures the decode steps of a GPU, one for each bucket of rows, before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol, cast

import torch

from allspan.worker.engine.buffers import InputBuffers
from allspan.worker.engine.device_buffers import DeviceBuffers
from allspan.worker.engine.model import StepModel
from allspan.worker.models.inputs import StepInputs

logger = logging.getLogger(__name__)


class Capturing(Protocol):
    """A model on a GPU."""

    def capture(self, inputs: StepInputs) -> None:
        """Records the forward pass of a step that is all padding."""


def capture_decodes(buffers: InputBuffers, model: StepModel, beat: Callable[[], None]) -> None:
    """`beat` is called after each step that was recorded. Nothing for buffers and models of another kind."""
    if not isinstance(buffers, DeviceBuffers):
        return
    captures = cast(Capturing, model)
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    for bucket in reversed(buffers.buckets):
        for is_shared in (False, True) if bucket in buffers.shared_buckets else (False,):
            captures.capture(buffers.padding(bucket, is_shared))
            beat()
    torch.cuda.synchronize()
    logger.info(
        "captured decode steps of %d sizes (1 to %d rows; %d also for rows that share tokens) in %.1f s, %.2f GiB",
        len(buffers.buckets),
        buffers.buckets[-1],
        len(buffers.shared_buckets),
        time.monotonic() - started,
        max(0, free - torch.cuda.mem_get_info()[0]) / 2**30,
    )
