"""Inputs on their way to a GPU: what the host writes next does not overtake them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from allspan.kernels.cuda.attention.prefill import Tiling
from allspan.protos.api.errors import DeadlineExceeded
from allspan.worker.backend.cuda.event_wait import Event, EventWaiter
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.backend.cuda.step_layout import chunk_buckets, own_buckets
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


def test_own_tokens_are_padded_to_about_their_share_or_twice_as_many_again() -> None:
    assert own_buckets(256, 1) == (256,)
    assert own_buckets(256, 2) == (144, 256)
    assert own_buckets(64, 8) == (9, 18, 36, 64)
    assert [own_buckets(bucket, 2) for bucket in (1, 2, 4)] == [(1,), (2,), (3, 4)]


@pytest.mark.parametrize(("own", "padded"), [((), 3), ((1, 2), 3), ((0, 1, 2), 3), ((0, 1, 2, 3), 4)])
def test_a_decode_has_the_rows_of_all_ranks_and_the_tables_of_its_own(own: tuple[int, ...], padded: int) -> None:
    sizes = BatchSizes(4, 8, 32, 4, 4, attention_ranks=2)
    buffers = DeviceBuffers(sizes, torch.device("cpu"), OneTile())
    ids, count = np.arange(10, 14), len(own)
    mine = np.array(own, dtype=np.int64)
    values = {"ids": ids, "own_rows": mine, "positions": 20 + mine, "slots": mine, "kv_lens": 21 + mine}
    values |= {"own_places": np.array([own.index(i) if i in own else -1 for i in range(4)])}
    values |= {"qo_indptr": np.arange(count + 1), "page_indptr": 6 * np.arange(count + 1)}
    values |= {"page_indices": np.zeros(6 * count), "logits_rows": np.arange(4)}
    inputs = buffers.fill(values, num_requests=4)
    none = [-1] * (padded - count)
    assert inputs.own_rows is not None
    assert inputs.own_places is not None
    assert inputs.ids.tolist() == ids.tolist()
    assert inputs.own_rows.tolist() == [*own, *none]
    assert inputs.slots.tolist() == [*own, *none]
    assert [place for place in inputs.own_places.tolist() if place >= 0] == list(range(count))
    assert inputs.kv_lens.tolist() == [21 + i for i in own] + [0] * (padded - count)
    assert (inputs.bucket, inputs.num_decodes, inputs.num_rows) == (4, padded, 4)


def test_a_step_with_prompts_of_other_ranks_alone_is_no_decode() -> None:
    sizes = BatchSizes(4, 8, 32, 4, 4, attention_ranks=2)
    buffers = DeviceBuffers(sizes, torch.device("cpu"), OneTile())
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    values = dict.fromkeys(("own_rows", "positions", "slots"), one) | {"kv_lens": one + 1, "qo_indptr": np.arange(2)}
    values |= {"ids": np.arange(4), "own_places": np.array([0, -1, -1, -1]), "logits_rows": np.arange(2)}
    values |= {"page_indptr": np.arange(2), "page_indices": one}
    assert buffers.fill(values, num_requests=2).bucket == 0
    buffers.chunks = (8,)
    inputs = buffers.fill(values, num_requests=2)
    assert inputs.own_places is not None
    assert inputs.decode_rows is not None
    assert (inputs.bucket, len(inputs.positions), inputs.num_rows) == (8, 5, 2)
    assert inputs.ids.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    assert inputs.own_places.tolist() == [0, *[-1] * 7]
    assert inputs.decode_rows.tolist() == [0, -1, -1, -1]
    values |= dict.fromkeys(("own_rows", "positions", "slots", "kv_lens", "page_indices"), none)
    values |= {"own_places": np.full(4, -1), "qo_indptr": np.zeros(1), "page_indptr": np.zeros(1)}
    assert buffers.fill(values, num_requests=2).place == inputs.place, "a rank without rows of its own takes part"


@pytest.mark.parametrize(("rows", "tokens"), [(1, 16), (2, 64), (8, 512), (100, 100)])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_every_recorded_step_fits_the_buffer(rows: int, tokens: int, has_drafts: bool) -> None:
    """With drafts decodes are of 64 rows at least, of requests that may be fewer."""
    sizes = BatchSizes(rows, tokens, 256, 16, max(rows, 64), has_drafts=has_drafts)
    buffers = DeviceBuffers(sizes, torch.device("cpu"), Tiling(7))
    buffers.chunks = chunk_buckets(tokens)
    found = [inputs for inputs in buffers.paddings() if inputs.decode_rows is None]
    assert max(inputs.bucket for inputs in found) == (min(max(rows, 64), tokens) if has_drafts else rows)
    capacity = len(buffers._buffer.hosts[0])
    for layout, _ in (*buffers._padded.values(), *buffers._chunked.values()):
        assert max(last for _, last in layout.spans.values()) <= capacity
