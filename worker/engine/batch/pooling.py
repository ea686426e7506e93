"""Pooling: requests whose result is a vector made of final hidden states. Nothing is sampled for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class RowPool:
    """What a running row has pooled so far. One that is preempted begins with a new pool."""

    pooling: str
    """One of `allspan.protos.api.options.POOLINGS`."""
    length: int
    """Tokens of its prompt."""
    head: NDArray[np.float64] | None = None
    """[labels, hidden]: what a score is made with."""
    count: int = 0
    """Rows that were added."""
    total: NDArray[np.float64] | None = None

    def wants(self, first: int, count: int) -> range:
        """Which of the `count` tokens from position `first` on are pooled, counted from that one."""
        if self.pooling == "mean":
            return range(count)
        if self.pooling == "cls":
            return range(int(first == 0))
        return range(count - 1, count) if first + count == self.length else range(0)

    def add(self, rows: Floats) -> None:
        """Adds hidden states in the order of their tokens, one after the other: the sum's bits are those of any other
        division into chunks."""
        for row in rows.astype(np.float64):
            self.total = row if self.total is None else self.total + row
        self.count += len(rows)

    def vector(self) -> bytes:
        """The result as little-endian float32: the mean of the rows, or their scores."""
        assert self.total is not None  # a prompt has tokens
        mean = self.total / self.count
        if self.pooling == "score" and self.head is not None:
            mean = (self.head * mean).sum(axis=1)
        return mean.astype("<f4").tobytes()


@dataclass(slots=True)
class PooledStep:
    """What the rows of a step pool of it."""

    parts: list[tuple[int, RowPool, range, bool]] = field(default_factory=list)
    """Row, its pool, the step's rows of hidden states for it, and whether the prompt ends with them."""

    @property
    def rows(self) -> range:
        """All rows of hidden states that are pooled: those of the parts follow each other."""
        return range(self.parts[0][2].start, self.parts[-1][2].stop)

    def commit(self, hidden: Floats) -> dict[int, bytes]:
        """Takes in what `rows` are; returns the vectors of the rows whose prompts have ended."""
        vectors: dict[int, bytes] = {}
        first = 0
        for row, pool, places, is_last in self.parts:
            pool.add(hidden[first : first + len(places)])
            first += len(places)
            if is_last:
                vectors[row] = pool.vector()
        return vectors


def pooled_step(
    pools: Mapping[int, RowPool], rows: Longs, starts: Longs, qo_indptr: Longs, num_sampled: int
) -> tuple[Longs, PooledStep]:
    """Which of a step's tokens are pooled, for its runs of `rows` from the positions `starts` on. Their hidden states
    come behind those of the `num_sampled` rows of logits."""
    tokens: list[int] = []
    step = PooledStep()
    for row, start, first, end in zip(rows.tolist(), starts.tolist(), qo_indptr[:-1], qo_indptr[1:], strict=True):
        pool = pools.get(row)
        if pool is None:
            continue
        wanted = pool.wants(start, int(end - first))
        is_last = start + int(end - first) == pool.length
        if wanted or is_last:
            at = num_sampled + len(tokens)
            step.parts.append((row, pool, range(at, at + len(wanted)), is_last))
            tokens += [int(first) + place for place in wanted]
    return np.asarray(tokens, dtype=np.int64), step
