"""FacadeChoice: a facade's choice among replicas, from what it knows of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from allspan.client.cluster.routing.choice import leading_key, order
from allspan.client.cluster.routing.knowledge import ReplicaKnowledge
from allspan.client.cluster.routing.replica_table import Loads, ReplicaTable, numbers_in
from allspan.protos.page_keys import PageShape

GROWTH = 1.01
"""A request counts this much more than the one before it, so that about the last hundred count."""

Keys = Callable[[PageShape], Iterable[int]]
"""The keys of a request's first full pages, for replicas of this shape; read twice, and only as far as is needed."""


class FacadeChoice:
    """One facade's knowledge of all replicas, by their numbers, which are the same in every facade."""

    def __init__(self, count: int, page_events: int) -> None:
        self.table = ReplicaTable(count)
        self.known = [ReplicaKnowledge(number, self.table, page_events) for number in range(count)]
        self._recent: Loads = np.zeros(count)
        self._scale = 1.0

    def sent(self, number: int, work: int, keys: Sequence[int]) -> None:
        """A request of `work` tokens goes to this replica, which will have these pages."""
        self.known[number].sent(work, keys)
        self._recent[number] += self._scale * work
        self._scale *= GROWTH
        if self._scale > 1e100:
            self._recent, self._scale = self._recent / self._scale, 1.0

    def ranked(self, keys_of: Keys, work: int, among: int, own_load: Callable[[int], int]) -> Iterator[tuple[int, int]]:
        """The replicas of the mask `among`, the best one first, each with the tokens that it is expected to have
        cached. `own_load`: what a replica has to compute for this facade, asked where its leader tells no load."""
        table = self.table
        if untold := table.untold & among:
            for number in numbers_in(untold):
                table.loads[number] = own_load(int(number))
        hits: list[tuple[int, int]] = []
        leading: int | None = None
        for shape, members in table.members.items():
            if members & among:
                keys = keys_of(shape)
                leading = leading_key(keys, shape.page_tokens) if leading is None else leading
                hits += ((count * shape.page_tokens, mask) for count, mask in table.index.match(keys, members & among))
        for number in order(numbers_in(among), table.loads, self._recent, hits, leading, work):
            yield number, next((hit for hit, mask in hits if mask >> number & 1), 0)
