"""DraftModel: a whole model in the ranks that drafts for another one, in pages of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.engine.batch.paging import paged_values
from allspan.worker.engine.steps.draft_sampler import DraftSampler
from allspan.worker.parallel.base import Collectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.step.inputs import InputBuffers, StepInputs
from allspan.worker.step.model import StepModel
from allspan.worker.step.rank_drafter import Drafted, DraftRows, DraftRun, RanStep

Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Tokens that were proposed for a row and whose keys lie in its pages."""

    since: int
    """The count of requests that had left rows by then."""
    first: int
    """The place of the first one in the row."""
    tokens: Sequence[int]


class DraftModel:
    """Proposes what it would say itself; see `allspan.worker.step.rank_drafter.RankDrafter`.

    What it writes for tokens that it proposes lies behind the row's own, in pages that the row keeps until it is
    drafted for again: where the row has gone on with them, they need not be taken in; else others' keys take their
    places.
    """

    follows = False

    def __init__(
        self,
        model: StepModel,
        buffers: InputBuffers,
        lifetimes: tuple[PageLifetime, ...],
        page_size: int,
        max_rows: int,
        collectives: Collectives,
        sampling: Sampling | None = None,
    ) -> None:
        """`buffers` of its steps' inputs, for `max_rows` requests; `lifetimes` of its cache groups. `sampling` None:
        the host's kernel."""
        self.model = model
        self.lifetimes = lifetimes
        self.max_model_len = model.max_model_len
        self._buffers = buffers
        self._page_size = page_size
        self._vocab_size = sum(model.vocab_widths)
        self._sampler = DraftSampler(max_rows, model.vocab_widths, collectives, sampling)
        self._ahead: dict[int, _Ahead] = {}

    def draft(self, runs: Sequence[DraftRun], rows: DraftRows, ran: RanStep) -> Mapping[int, Drafted]:
        kept = {run: self._kept(run, rows) for run in runs}
        taken = {run: self._count(run, rows) - kept[run] for run in runs}
        ordered = sorted((run for run in runs if taken[run]), key=lambda run: (taken[run] > 1, run.row))
        found = {run.row: Drafted(run.first + kept[run] + taken[run]) for run in runs}
        if not ordered:
            return found
        self._sampler.follow(rows)
        numbers = np.asarray([run.row for run in ordered])
        counts = np.asarray([taken[run] for run in ordered])
        starts = np.asarray([run.first + kept[run] for run in ordered])
        ids = np.concatenate([rows.tokens[run.row, run.first + kept[run] :][: taken[run]] for run in ordered])
        is_whole = starts + counts == rows.num_tokens[numbers]
        asked = np.where(is_whole, [run.num_drafts for run in ordered], 0)
        drafting = np.flatnonzero(asked > 0)
        tokens = self._forward(rows, numbers, counts, starts, ids, np.cumsum(counts)[drafting] - 1)
        made: dict[int, list[int]] = {int(row): [] for row in numbers}
        while len(drafting):
            for i, token in zip(drafting.tolist(), tokens.tolist(), strict=True):
                made[int(numbers[i])].append(token)
            lengths = np.asarray([len(made[row]) for row in numbers.tolist()])
            goes_on = (lengths[drafting] < asked[drafting]) & (tokens >= 0)
            drafting, tokens = drafting[goes_on], tokens[goes_on]
            if len(drafting):
                ends = (starts + counts + lengths - 1)[drafting]
                tokens = self._forward(rows, numbers[drafting], np.ones_like(ends), ends, tokens, np.arange(len(ends)))
        for row, drafts in made.items():
            self._ahead[row] = _Ahead(rows.leaves.count, found[row].num_tokens, drafts[:-1])
        return {row: Drafted(each.num_tokens, tuple(made.get(row, ()))) for row, each in found.items()}

    def trial(self, count: int, start: int) -> StepInputs:
        row, counts, starts = (np.full(1, value, dtype=np.int64) for value in (0, count, start))
        tables = [np.arange(-(-(start + count) // self._page_size), dtype=np.int32)[None]] * len(self.lifetimes)
        values = paged_values(tables, self.lifetimes, self._page_size, row, counts, starts)
        values |= {"ids": np.zeros(count, dtype=np.int32), "logits_rows": np.arange(count)}
        return self._buffers.fill(values)

    def _kept(self, run: DraftRun, rows: DraftRows) -> int:
        """How many tokens that were proposed for the row it has gone on with, so that their keys are there. The last of
        the row's tokens is run in any case."""
        ahead, most = self._ahead.pop(run.row, None), min(run.most, int(rows.num_tokens[run.row]) - run.first) - 1
        if ahead is None or ahead.first != run.first or not rows.leaves.stayed(np.asarray([run.row]), ahead.since)[0]:
            return 0
        tokens = rows.tokens[run.row, run.first :][:most].tolist()
        pairs = zip(tokens, ahead.tokens, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _count(self, run: DraftRun, rows: DraftRows) -> int:
        """How many of the row's tokens a run takes in: none behind an id that the model does not have, and none behind
        -1, which a row has whose logits were not finite."""
        count = min(run.most, int(rows.num_tokens[run.row]) - run.first)
        tokens = rows.tokens[run.row, run.first : run.first + count]
        unknown = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        return int(unknown[0]) if len(unknown) else count

    def _forward(
        self, rows: DraftRows, numbers: Longs, counts: Longs, starts: Longs, ids: NDArray[np.int32], wanted: Longs
    ) -> NDArray[np.int32]:
        """Runs `counts` more tokens of the rows `numbers`, `ids`, behind `starts`. Returns the token that is drawn
        behind those that are `wanted`, which are the last of their rows; negative where none can be."""
        groups = len(self.lifetimes)
        if (rows.num_pages[-groups:, numbers] * self._page_size < starts + counts).any():
            raise InternalError("a row is drafted for past its pages of the drafter")
        tables = rows.tables[-groups:]
        values = paged_values(tables, self.lifetimes, self._page_size, numbers, counts, starts)
        logits = self.model.forward(self._buffers.fill(values | {"ids": ids, "logits_rows": wanted}))
        at = np.searchsorted(np.cumsum(counts), wanted, side="right")
        return self._sampler.sample(logits, numbers[at], (starts + counts)[at])
