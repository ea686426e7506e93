"""Streams: queues of a GPU that go on beside each other, and marks by which one waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allspan.worker.backend.cuda.event_wait import Event


class Stream(Protocol):
    """What it is given is done in that order. No call waits."""

    def run(self, work: Callable[[], None]) -> None:
        """Does next what `work` launches."""

    def record(self) -> Event:
        """Happens once all that has been given is done."""

    def wait(self, event: Event) -> None:
        """What is given from now on waits for an event of another stream."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The CUDA streams of one GPU."""

    steps: Stream
    """Runs the model's steps."""
    saves: Stream
    """From the device to host memory."""
    loads: Stream
    """From host memory to the device."""


def current_stream() -> Stream:
    """The stream that is current when it is used."""
    return _TorchStream(None)


def cuda_streams() -> Streams:
    """The stream that is current when it is used, and two of their own."""
    return Streams(current_stream(), _TorchStream(torch.cuda.Stream()), _TorchStream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]


class StreamCopies:
    """A SideCopies whose copies go on in the stream of loads, beside the one of the steps. What comes from memory that
    is not pinned may wait for steps in flight, in the thread that copies."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def after_steps(self) -> None:
        self._streams.loads.wait(self._streams.steps.record())

    def run(self, work: Callable[[], None]) -> None:
        self._streams.loads.run(work)

    def before_steps(self) -> None:
        self._streams.steps.wait(self._streams.loads.record())


@dataclass(frozen=True, slots=True)
class _TorchStream:
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
