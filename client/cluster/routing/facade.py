"""FacadeChoice: a facade's choice among replicas, from what it knows of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from allspan.client.cluster.routing.choice import leading_key, order
from allspan.client.cluster.routing.knowledge import ReplicaKnowledge
from allspan.client.cluster.routing.page_index import PageIndex
from allspan.protos.page_keys import PageShape

GROWTH = 1.01
"""A request counts this much more than the one before it, so that about the last hundred count."""

Keys = Callable[[PageShape], list[int]]
"""The keys of a request's first full pages, for replicas of this shape."""


class FacadeChoice:
    """One facade's knowledge of all replicas, by their numbers, which are the same in every facade."""

    def __init__(self, count: int, page_events: int) -> None:
        self.index = PageIndex()
        self.known = [ReplicaKnowledge(number, self.index, page_events) for number in range(count)]
        self._recent = [0.0] * count
        self._scale = 1.0

    def sent(self, number: int, work: int, keys: Sequence[int]) -> None:
        """A request of `work` tokens goes to this replica, which will have these pages."""
        self.known[number].sent(work, keys)
        self._recent[number] += self._scale * work
        self._scale *= GROWTH
        if self._scale > 1e100:
            self._recent, self._scale = [recent / self._scale for recent in self._recent], 1.0

    def ranked(self, keys_of: Keys, work: int, own_loads: Mapping[int, Callable[[], int]]) -> Iterator[tuple[int, int]]:
        """The replicas of `own_loads`, the best one first, each with the tokens that it is expected to have cached.
        `own_loads`: what each has to compute for this facade, asked where its leader tells no load."""
        by_shape: dict[int, int] = {}  # by the identity of a shape, which equal ones share: hashing one takes 1 us
        shapes: dict[int, PageShape] = {}
        loads: dict[int, int] = {}
        for number, own_load in own_loads.items():
            known = self.known[number]
            shape = known.shape
            identity = id(shape)
            if identity in by_shape:
                by_shape[identity] |= 1 << number
            else:
                by_shape[identity], shapes[identity] = 1 << number, shape
            load = known.load
            loads[number] = own_load() if load is None else load
        hits: dict[int, int] = {}
        leading: int | None = None
        for identity, members in by_shape.items():
            shape = shapes[identity]
            keys = keys_of(shape)
            leading = leading_key(keys, shape.page_tokens) if leading is None else leading
            matched = self.index.match(keys, members)
            hits.update((number, count * shape.page_tokens) for number, count in matched.items())
        for number in order(loads, self._recent, hits, leading, work):
            yield number, hits.get(number, 0)
