"""RowStates: the state of each row of a rank's batch, in fixed arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.cache.budget import pages_of
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.scheduler.plan import Grant
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.row_inputs import POSITION_AXES, PromptEmbeddings, PromptPositions

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class Leaves:
    """Counts the requests that have left a row."""

    def __init__(self, rows: int) -> None:
        self.count = 0
        self._left_at: Longs = np.zeros(rows, dtype=np.int64)

    def add(self, row: int) -> None:
        """The request of the row has left it."""
        self.count += 1
        self._left_at[row] = self.count

    def stayed(self, rows: Longs, since: int) -> NDArray[np.bool_]:
        """Which of `rows` belong to the request that had them when `count` was `since`."""
        kept: NDArray[np.bool_] = self._left_at[rows] <= since
        return kept


class RowStates:
    """One entry a row. Steps in flight are counted as if they were over: a token that is still being sampled has its
    place in `tokens`, and its value there once the step is committed."""

    def __init__(self, sizes: BatchSizes, lifetimes: Sequence[PageLifetime]) -> None:
        """`lifetimes`: of the cache groups."""
        rows, pages = sizes.max_rows, pages_of(sizes.max_model_len, sizes.page_size)
        # The system backs these with memory only where they are written.
        self.tokens: Ints = np.zeros((rows, sizes.max_model_len), dtype=np.int32)
        self.tables: list[Ints] = [
            np.zeros((rows, 1 if each.is_state else pages), dtype=np.int32) for each in lifetimes
        ]
        """For each cache group, the pages of each row by their places."""
        self.adapters: Ints = np.full(rows, -1, dtype=np.int32)
        self.embeddings: dict[int, PromptEmbeddings] = {}
        self.positions: dict[int, PromptPositions] = {}
        self.first_rotary_rows: Longs = np.zeros(rows, dtype=np.int64)
        """The row of the rotary tables that the first token of each row's request has."""
        self.hidden: set[int] = set()
        """Rows whose hidden state is asked for."""
        self.num_tokens: Longs = np.zeros(rows, dtype=np.int64)
        self.num_drafts: Longs = np.zeros(rows, dtype=np.int64)
        """Tokens behind the last one that a step in flight verifies."""
        self.num_computed: Longs = np.zeros(rows, dtype=np.int64)
        self.num_pages: Longs = np.zeros((len(lifetimes), rows), dtype=np.int64)
        """For each cache group, the place up to which a row has pages."""
        self.prompt_ends: Longs = np.zeros(rows, dtype=np.int64)
        """The prompt's last index for rows that want its log-probabilities, else 0."""
        self.request_ids: list[bytes | None] = [None] * rows
        self.params: list[SamplingParams | None] = [None] * rows
        self.leaves = Leaves(rows)

    def enter(self, row: int, request_id: bytes, tokens: Ints, num_computed: int) -> None:
        """A request gets the row, with no pages yet."""
        self.request_ids[row] = request_id
        self.tokens[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_computed[row] = num_computed
        self.num_pages[:, row] = 0

    def draft(self, row: int, drafts: Sequence[int]) -> int:
        """Puts drafts behind the row's tokens, and returns how many these are."""
        count = int(self.num_tokens[row])
        self.tokens[row, count : count + len(drafts)] = drafts
        self.num_drafts[row] = len(drafts)
        return count

    def accept(self, row: int, sampled: Sequence[int]) -> int:
        """Keeps the drafts that agree with what was sampled in their places; returns how many."""
        count, first = int(self.num_drafts[row]), int(self.num_tokens[row]) - 1
        drafts = self.tokens[row, first : first + count].tolist()
        kept = next((i for i in range(count) if drafts[i] != sampled[i]), count)
        self.num_drafts[row] = 0
        self.num_tokens[row] += kept
        self.num_computed[row] -= count - kept
        return kept

    def leave(self, row: int) -> None:
        self.request_ids[row] = self.params[row] = None
        self.adapters[row] = -1
        self.embeddings.pop(row, None)
        self.positions.pop(row, None)
        self.hidden.discard(row)
        self.leaves.add(row)

    def axes(self, rows: Longs, indices: Longs) -> Longs:
        """[axes, n]: the positions of the tokens with these indices in the requests of `rows`."""
        found: Longs = np.tile(indices, (len(POSITION_AXES), 1))
        for row, positions in self.positions.items():
            mine = rows == row
            found[:, mine] = positions.at(indices[mine])
        return found

    def needs_prompt_positions(self, rows: Longs) -> bool:
        """Whether the next token of one of `rows` is a prompt's that has positions of its own."""
        lengths = ((row, positions.rows.shape[1]) for row, positions in self.positions.items() if row in rows)
        return any(self.num_computed[row] < prompt_len for row, prompt_len in lengths)

    def grant(self, grant: Grant) -> None:
        last = grant.first + len(grant.pages)
        self.tables[grant.group][grant.row, grant.first : last] = grant.pages
        self.num_pages[grant.group, grant.row] = last
