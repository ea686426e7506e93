"""Inputs on their way to a GPU: what the host writes next does not overtake them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from allspan.protos.api.errors import DeadlineExceeded
from allspan.worker.backend.cuda.event_wait import Event, EventWaiter
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.step.buffer_sizes import BatchSizes
from support.fake_model import OneTile

TOKENS = 5


@dataclass
class Copied:
    """Happens at the second look."""

    happens: bool = True
    looks: int = 0

    def query(self) -> bool:
        self.looks += 1
        return self.happens and self.looks > 1


@dataclass
class FakeStream:
    """A GPU's queue, of which only the events are looked at."""

    happens: bool = True
    events: list[Copied] = field(default_factory=list)

    def run(self, work: Callable[[], None]) -> None:
        raise NotImplementedError

    def record(self) -> Event:
        self.events.append(Copied(self.happens))
        return self.events[-1]

    def wait(self, event: Event) -> None:
        raise NotImplementedError


def buffers_on(stream: FakeStream) -> DeviceBuffers:
    return DeviceBuffers(BatchSizes(2, 8, 32, 4, 2), torch.device("cpu"), OneTile(), None, stream, EventWaiter(0.05))


def fill(buffers: DeviceBuffers, first: int) -> list[int]:
    """A piece of a prompt, of which no token is sampled."""
    none = np.zeros(0, dtype=np.int64)
    ids = np.arange(first, first + TOKENS)
    values = dict.fromkeys(("logits_rows", "page_indices"), none) | dict.fromkeys(("ids", "positions", "slots"), ids)
    values |= {"qo_indptr": np.array([0, TOKENS]), "page_indptr": np.zeros(2), "kv_lens": np.array([TOKENS])}
    return buffers.fill(values).ids.tolist()


def test_a_buffer_is_written_again_once_its_copy_has_been_made() -> None:
    stream = FakeStream()
    buffers = buffers_on(stream)
    assert [fill(buffers, 10 * step) for step in range(4)] == [list(range(10 * s, 10 * s + TOKENS)) for s in range(4)]
    assert [event.looks > 1 for event in stream.events] == [True, True, False, False]


def test_a_copy_that_is_never_made_is_not_written_over() -> None:
    stream = FakeStream(happens=False)
    buffers = buffers_on(stream)
    fill(buffers, 0)
    fill(buffers, 10)
    with pytest.raises(DeadlineExceeded, match="watchdog_timeout"):
        fill(buffers, 20)
    held = [host[:TOKENS].tolist() for host in buffers._buffer.hosts]
    assert sorted(held) == [list(range(TOKENS)), list(range(10, 10 + TOKENS))]
