"""Waiting for a GPU, not for ever: CUDA's own calls know no deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from allspan.protos.api.errors import DeadlineExceeded

_AWAKE_S = 0.02
"""Decode steps are over by then: until then every microsecond counts, and the processor looks without a pause."""
_PAUSE_S = 5e-5


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def query(self) -> bool:
        """Whether the GPU has come so far."""


@dataclass(frozen=True, slots=True)
class EventWaiter:
    """How long a rank waits for its GPU before it gives up."""

    timeout_s: float = 30.0
    """`ServiceConfig.watchdog_timeout`."""

    def wait(self, event: Event) -> None:
        """Until the event has happened. Raises DeadlineExceeded."""
        if event.query():
            return
        started = time.monotonic()
        while not event.query():
            waited = time.monotonic() - started
            if waited > self.timeout_s:
                raise DeadlineExceeded(
                    f"the GPU has not finished a step for {self.timeout_s:g} s (watchdog_timeout): it hangs, or other "
                    "programs keep it busy; see nvidia-smi and, for Xid errors, dmesg; then start again, with a longer "
                    "watchdog_timeout if steps may take so long"
                )
            time.sleep(0.0 if waited < _AWAKE_S else _PAUSE_S)  # either lets other threads of Python run

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, or the tensor itself where it is there. Raises DeadlineExceeded."""
        if tensor.is_cuda:
            self.drain()
        return tensor.cpu()

    def drain(self) -> None:
        """Until all that this thread's stream has been given is done. Raises DeadlineExceeded."""
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[attr-defined]
        self.wait(event)


DEFAULT_WAITER = EventWaiter()
