"""What a facade knows of one replica: its load and its cached pages, as the leader tells them, or as remembered."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from allspan.client.cluster.adapters import ClusterAdapters
from allspan.client.cluster.routing.replica_table import ReplicaTable
from allspan.protos import worker_pb2 as pb
from allspan.protos.page_keys import PageShape

KEYS = 1
"""See `ResultsSubscription.page_events`."""
UNTOLD = PageShape(32, "")
"""Blocks of a replica that tells nothing: what was sent there is remembered by these."""
MAX_PAGES = 512
"""Most pages of a request that are looked up."""
MAX_EXPECTED = 65536
"""Most pages that are remembered of a replica and were not told; the least recently used are dropped first."""

logger = logging.getLogger(__name__)

_shape = lru_cache(maxsize=64)(PageShape)
"""The same object for the same values."""


class ReplicaKnowledge:
    """One replica's pages and its load, kept in the table of all replicas.

    `page_events`: what to ask of its leader; 0 where there is nothing to choose.
    """

    def __init__(self, number: int, table: ReplicaTable, page_events: int = KEYS) -> None:
        self.number = number
        self.page_events = page_events
        self.adapters = ClusterAdapters().of_replica()
        """What its leader tells of adapters; the router gives all replicas' one cluster."""
        self._table = table
        self._index = table.index
        self._shape = UNTOLD
        table.reshape(number, None, UNTOLD)
        self._told: set[int] = set()
        self._expected: OrderedDict[int, None] = OrderedDict()
        self._next_sequence = 0
        self._queued: int | None = None
        self._sent = 0

    def __len__(self) -> int:
        """Pages that it has, or will have soon."""
        return len(self._told) + len(self._expected)

    @property
    def shape(self) -> PageShape:
        """What its pages' keys are made of."""
        return self._shape

    @property
    def load(self) -> int | None:
        """Tokens that it has to compute: as told, and what was sent since; None: nothing was told."""
        return None if self._queued is None else self._queued + self._sent

    @property
    def is_told(self) -> bool:
        """True once its leader has told what it has cached."""
        return self._shape is not UNTOLD

    def hear(self, message: pb.StepOutputs, model: str) -> bool:
        """Takes what the leader of a world of this model tells. False: page events were missing before these; nothing
        is known of its pages until it has told all of them again, which it is to be asked for."""
        if message.HasField("adapters"):
            self.adapters.hear(message.adapters)
        if message.HasField("load"):
            self._queued, self._sent = message.load.queued_tokens, 0
            self._table.tell_load(self.number, self._queued)
        is_whole = True
        for events in message.page_events:
            is_whole &= self._apply(events, model)
        return is_whole

    def sent(self, work: int, keys: Sequence[int]) -> None:
        """A request of `work` tokens goes there; it will have these pages."""
        self._sent += work
        if self._queued is not None:
            self._table.tell_load(self.number, self._queued + self._sent)
        self.expect(keys)

    def expect(self, keys: Sequence[int]) -> None:
        """It has these pages, or will have them."""
        new = [key for key in reversed(keys) if key not in self._told]  # the first ones, which more share, leave last
        for key in new:
            self._expected[key] = None
            self._expected.move_to_end(key)
        self._index.add(self.number, new)
        while len(self._expected) > MAX_EXPECTED:
            self._index.discard(self.number, [self._expected.popitem(last=False)[0]])

    def clear(self) -> None:
        """It has nothing cached, as far as is known."""
        self._index.discard(self.number, self._told)
        self._index.discard(self.number, self._expected)
        self._told.clear()
        self._expected.clear()

    def forget(self) -> None:
        """Its world is over."""
        self.clear()
        self.adapters.forget()
        self._reshape(UNTOLD)
        self._queued, self._sent = None, 0
        self._table.tell_load(self.number, None)

    def _reshape(self, shape: PageShape) -> None:
        self._table.reshape(self.number, self._shape, shape)
        self._shape = shape

    def _apply(self, events: pb.PageEvents, model: str) -> bool:
        """Returns False where a gap is noticed."""
        if events.cleared:
            self.clear()
            lengths = tuple(events.prompt_lengths)
            shape = _shape(events.page_tokens, model, events.weights_version, lengths)
            self._reshape(shape)
        elif not self.is_told:
            return True  # what follows a gap, until the next snapshot
        elif events.sequence != self._next_sequence:
            logger.warning("page events %d of replica %d are missing", self._next_sequence, self.number)
            self.clear()
            self._reshape(UNTOLD)
            return False
        self._next_sequence = events.sequence + 1
        for key in events.removed:
            self._told.discard(key)
            self._expected.pop(key, None)
        self._index.discard(self.number, events.removed)
        stored = [page.key for page in events.stored]
        for key in stored:
            self._expected.pop(key, None)
        self._told.update(stored)
        self._index.add(self.number, stored)
        return True
