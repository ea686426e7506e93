"""Lanes: queues of a GPU that go on beside each other, and marks by which one waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allspan.worker.backend.cuda.event_wait import Event


class Lane(Protocol):
    """What it is given is done in that order. No call waits."""

    def run(self, work: Callable[[], None]) -> None:
        """Does next what `work` launches."""

    def record(self) -> Event:
        """Happens once all that has been given is done."""

    def wait(self, event: Event) -> None:
        """What is given from now on waits for an event of another lane."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Of one GPU."""

    steps: Lane
    """Those of the model."""
    saves: Lane
    """From the device to host memory."""
    loads: Lane
    """From host memory to the device."""


def current_lane() -> Lane:
    """The stream that is current when it is used."""
    return _CudaLane(None)


def cuda_lanes() -> Lanes:
    """The stream that is current when it is used, and two of their own."""
    return Lanes(current_lane(), _CudaLane(torch.cuda.Stream()), _CudaLane(torch.cuda.Stream()))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _CudaLane:
    stream: Any
    """None: the current one."""

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream or torch.cuda.current_stream())
        happens: Event = event
        return happens

    def wait(self, event: Event) -> None:
        stream: Any = self.stream or torch.cuda.current_stream()
        stream.wait_event(event)
