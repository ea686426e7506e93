"""Two ranks load adapters: both have one or neither, and what one cannot read both say alike."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import AdapterRank, AllspanError, CheckpointError, InternalError, InvalidRequest
from allspan.protos.model_files.regular_file import Opener
from allspan.worker.adapters.registry import AdapterRegistry, load_argument
from allspan.worker.adapters.staged import Put, StagedAdapter
from allspan.worker.step.side_copies import HostCopies
from support.threads import ThreadWorld
from support.waiting import wait_until

MODULE = AdapterModule("sql", "/adapters/sql", digest=77)


class Slots:
    """Slots of no size: `failure` is what reading raises, `checksum` is of what it reads, `may_end` lets it end,
    `may_write` writing."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_reading, self.is_writing = threading.Event(), threading.Event()
        self.failure: Exception | None = None
        self.checksum = "a"
        self.may_end = threading.Event()
        self.may_end.set()
        self.written: list[int] = []
        self.given_up = False

    def stage(self, path: Path, goes_on: Callable[[], bool], opener: Opener, put: Put | None = None) -> StagedAdapter:
        assert path == Path(MODULE.path)
        self.is_reading.set()
        assert self.may_end.wait(10)
        self.given_up = not goes_on()
        if self.failure is not None:
            raise self.failure
        if put is not None:
            for _ in range(2):
                put({})
        return StagedAdapter({}, self.checksum)

    def write(self, slot: int, staged: StagedAdapter) -> None:
        self.is_writing.set()
        assert self.may_write.wait(10)
        self.written.append(slot)


class Noted(HostCopies):
    """Notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def after_steps(self) -> None:
        self.calls.append("after")

    def run(self, work: Callable[[], None]) -> None:
        self.calls.append("run")
        work()

    def before_steps(self) -> None:
        self.calls.append("before")


class World:
    def __init__(self, keeps_copies: bool = True, size: int = 2) -> None:
        collectives = ThreadWorld(size).collectives
        self.slots = [Slots() for _ in range(size)]
        self.ranks = [
            AdapterRegistry(slots, each, "", keeps_copies, HostCopies())
            for slots, each in zip(self.slots, collectives, strict=True)
        ]

    def read(self, slot: int = 0) -> None:
        for rank, slots in zip(self.ranks, self.slots, strict=True):
            rank.read(load_argument(MODULE, slot))
            if slots.may_end.is_set():
                rank.wait(10)

    def add(self) -> list[bool | AllspanError]:
        """What `add` returns or raises on each rank."""

        def one(rank: AdapterRegistry) -> bool | AllspanError:
            try:
                return rank.add()
            except AllspanError as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(one, self.ranks))

    def known(self) -> list[list[int]]:
        return [list(rank.modules) for rank in self.ranks]


def test_all_ranks_have_an_adapter_at_once_when_the_slowest_has_read_it() -> None:
    world = World()
    world.slots[1].may_end.clear()
    world.read(slot=1)
    assert (world.add(), world.known()) == ([False, False], [[], []])
    world.slots[1].may_end.set()
    world.ranks[1].wait(10)
    assert (world.add(), world.known()) == ([True, True], [[77], [77]])
    assert [slots.written for slots in world.slots] == [[1], [1]]
    for rank in world.ranks:
        rank.place(0, 77)
    assert [slots.written for slots in world.slots] == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (CheckpointError("/adapters/sql: is missing"), InvalidRequest, "/adapters/sql: is missing"),
        (OSError(5, "Input/output error"), InvalidRequest, "Input/output error"),
        (AdapterRank("the adapter has rank 9"), AdapterRank, "the adapter has rank 9"),
        (RuntimeError("no memory"), InternalError, "RuntimeError: no memory"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_adapter_that_one_rank_cannot_read_is_refused_on_all_with_its_reason(
    failure: Exception, kind: type[AllspanError], words: str
) -> None:
    world = World()
    world.slots[1].failure = failure
    world.read()
    told = world.add()
    assert [type(each) for each in told] == [kind, kind]
    assert str(told[0]) == str(told[1])
    assert "the adapter 'sql' cannot be loaded: rank 1: " in str(told[0])
    assert words in str(told[0])
    assert world.known() == [[], []]
    world.slots[1].failure = None
    world.read()
    assert (world.add(), world.known()) == ([True, True], [[77], [77]])


def test_ranks_that_have_read_different_files_are_named_and_none_has_the_adapter() -> None:
    world = World(size=3)
    world.slots[1].checksum = world.slots[2].checksum = "b"
    world.slots[1].may_end.clear()
    world.read()
    assert world.add() == [False] * 3  # the one that differs is known once all have read
    world.slots[1].may_end.set()
    world.ranks[1].wait(10)
    told = world.add()
    assert [type(each) for each in told] == [InvalidRequest] * 3
    assert "the adapter 'sql' cannot be loaded: ranks 1, 2 read other matrices than rank 0" in str(told[0])
    assert world.known() == [[]] * 3
    assert [type(each) for each in world.add()] == [InternalError] * 3  # nothing is being read any more
    for slots in world.slots:
        slots.checksum = "b"
    world.read()
    assert (world.add(), world.known()) == ([True] * 3, [[77]] * 3)


def test_reading_that_is_given_up_ends_early_and_leaves_nothing() -> None:
    world = World()
    for slots in world.slots:
        slots.may_end.clear()
    world.read()
    for rank, slots in zip(world.ranks, world.slots, strict=True):
        assert slots.is_reading.wait(10)
        rank.drop(77)
    for slots in world.slots:
        slots.may_end.set()
    wait_until(lambda: all(slots.given_up for slots in world.slots), what="the end of reading")
    assert [type(each) for each in world.add()] == [InternalError, InternalError]
    assert world.known() == [[], []]


def test_a_slot_is_written_no_more_once_its_adapter_is_given_up() -> None:
    slots = Slots()
    slots.may_write.clear()
    rank = AdapterRegistry(slots, ThreadWorld(1).collectives[0], "", True, HostCopies())
    rank.read(load_argument(MODULE, 3))
    assert slots.is_writing.wait(10)
    threading.Timer(0.05, slots.may_write.set).start()
    rank.drop(77)
    assert slots.written == [3]  # the slot may be another adapter's from now on


def test_layers_go_to_a_slot_one_by_one_until_its_adapter_is_given_up() -> None:
    slots = Slots()
    slots.may_write.clear()
    rank = AdapterRegistry(slots, ThreadWorld(1).collectives[0], "", False, HostCopies())
    rank.read(load_argument(MODULE, 3))
    assert slots.is_writing.wait(10)
    threading.Timer(0.05, slots.may_write.set).start()
    rank.drop(77)
    written = list(slots.written)  # one layer, or both
    rank.read(load_argument(MODULE, 4))
    rank.wait(10)
    assert slots.written == [*written, 4, 4]
    assert rank.add()
    assert slots.written == [*written, 4, 4]  # it is there already


def test_copies_come_behind_steps_in_flight_and_ahead_of_those_that_read_them() -> None:
    copies = Noted()
    rank = AdapterRegistry(Slots(), ThreadWorld(1).collectives[0], "", False, copies)
    rank.read(load_argument(MODULE, 0))
    rank.wait(10)
    assert rank.add()
    assert copies.calls == ["after", "run", "run", "before"]


def test_what_is_given_up_is_copied_before_its_slot_is_written_anew() -> None:
    copies = Noted()
    rank = AdapterRegistry(Slots(), ThreadWorld(1).collectives[0], "", False, copies)
    rank.read(load_argument(MODULE, 0))
    rank.wait(10)
    rank.drop(77)
    assert copies.calls == ["after", "run", "run", "before"]


def test_a_process_of_low_priority_reads_adapters_at_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda which, who: 5)
    monkeypatch.setattr(os, "setpriority", lambda which, who, value: told.append(value))
    World().read()
    assert told == [6] * len(told)
    assert told


def test_an_adapter_with_a_slot_for_good_takes_no_host_memory_beside_it() -> None:
    world = World(keeps_copies=False)
    world.read()
    world.add()
    with pytest.raises(InternalError, match="which this rank does not have"):
        world.ranks[0].place(1, 77)
    world.ranks[0].drop(77)
    world.ranks[0].drop(77)
    assert world.known() == [[], [77]]
