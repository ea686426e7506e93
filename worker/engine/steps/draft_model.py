"""DraftModel: a whole model in the ranks that drafts for another one, in pages of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.engine.batch.paging import Requests, each_token, paged_values
from allspan.worker.engine.steps.draft_sampler import DraftSampler
from allspan.worker.step.buffer_sizes import most_logits_rows
from allspan.worker.step.inputs import InputBuffers, StepInputs
from allspan.worker.step.model import StepModel
from allspan.worker.step.rank_drafter import Drafted, DraftRows, DraftRun, RanStep

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
_FEW = 8
"""Tokens of a request that a device which takes drafts as requests of their own takes so, too: as decodes, for which
attention over a long context is shared out among the whole device."""


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
        sampler: DraftSampler,
    ) -> None:
        """`buffers` of its steps' inputs; `lifetimes` of its cache groups; `sampler` draws from its logits."""
        self.model = model
        self.lifetimes = lifetimes
        self.max_model_len = model.max_model_len
        self.buffers = buffers
        self._page_size = page_size
        self._vocab_size = sum(model.vocab_widths)
        self._sampler = sampler
        self._ahead: dict[int, _Ahead] = {}

    def draft(self, runs: Sequence[DraftRun], rows: DraftRows, ran: RanStep) -> Mapping[int, Drafted]:
        kept = {run: self._kept(run, rows) for run in runs}
        taken = {run: self._count(run, rows) - kept[run] for run in runs}
        found = {run.row: run.first + kept[run] + taken[run] for run in runs}
        ordered = sorted(
            (run for run in runs if taken[run]), key=lambda run: (taken[run] > 1, -run.num_drafts, run.row)
        )
        if not ordered:
            return {row: Drafted(num_tokens) for row, num_tokens in found.items()}
        self._sampler.follow(rows)
        numbers = np.asarray([run.row for run in ordered])
        counts = np.asarray([taken[run] for run in ordered])
        starts = np.asarray([run.first + kept[run] for run in ordered])
        ends = starts + counts
        asked = np.where(ends == rows.num_tokens[numbers], [run.num_drafts for run in ordered], 0)
        drafting = np.argsort(-asked, kind="stable")[: np.count_nonzero(asked)]
        ids = np.concatenate([rows.tokens[run.row, run.first + kept[run] :][: taken[run]] for run in ordered])
        logits = self._forward(rows, numbers, counts, starts, ids, np.cumsum(counts)[drafting] - 1)
        row_ids, firsts = numbers[drafting], ends[drafting]

        def behind(depth: int, tokens: Tensor) -> Tensor:
            count = len(tokens)
            ones, wanted = np.ones(count, dtype=np.int64), np.arange(count)
            return self._forward(rows, row_ids[:count], ones, firsts[:count] + depth - 1, tokens, wanted)

        made = self._sampler.chain(logits, row_ids, firsts, asked[drafting], behind)
        for run in ordered:
            self._ahead[run.row] = _Ahead(rows.leaves.count, found[run.row], made.get(run.row, ())[:-1])
        return {row: Drafted(num_tokens, made.get(row, ())) for row, num_tokens in found.items()}

    def follow(self, rows: DraftRows, ran: RanStep, tokens: Tensor | None) -> None:
        """Does nothing: its runs say what it takes in."""

    def trial(self, count: int, start: int) -> StepInputs:
        row, counts, starts = (np.full(1, value, dtype=np.int64) for value in (0, count, start))
        requests = each_token(row, counts, starts) if self.buffers.splits_drafts else (row, counts, starts)
        tables = [np.arange(-(-(start + count) // self._page_size), dtype=np.int32)[None]] * len(self.lifetimes)
        return self._fill(tables, requests, np.zeros(count, dtype=np.int32), np.arange(count))

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
        self, rows: DraftRows, numbers: Longs, counts: Longs, starts: Longs, ids: Ints | Tensor, wanted: Longs
    ) -> Tensor:
        """Runs `counts` more tokens of the rows `numbers`, `ids`, behind `starts`. Returns the logits of those that are
        `wanted`."""
        groups = len(self.lifetimes)
        if (rows.num_pages[-groups:, numbers] * self._page_size < starts + counts).any():
            raise InternalError("a row is drafted for past its pages of the drafter")
        known = ids if isinstance(ids, np.ndarray) else np.zeros(len(ids), dtype=np.int32)
        inputs = self._fill(rows.tables[-groups:], (numbers, counts, starts), known, wanted)
        if isinstance(ids, Tensor):  # drafts are on the device, perhaps there alone
            inputs.ids[: len(ids)].copy_(ids)
        return self.model.forward(inputs)

    def _fill(self, tables: Sequence[Ints], requests: Requests, ids: Ints, wanted: Longs) -> StepInputs:
        """The inputs of a step; `requests`: of each the row, the number of tokens, and the position of the first."""
        numbers, counts, starts = requests
        if self.buffers.splits_drafts and counts.max() <= _FEW and len(ids) <= most_logits_rows(len(tables[0])):
            numbers, counts, starts = each_token(numbers, counts, starts)
        values = paged_values(tables, self.lifetimes, self._page_size, numbers, counts, starts)
        return self.buffers.fill(values | {"ids": ids, "logits_rows": wanted})
