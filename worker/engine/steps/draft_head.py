"""DraftHead: layers in the ranks that draft from the states of the model whose tokens they propose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.engine.batch.paging import paged_values
from allspan.worker.engine.steps.draft_sampler import DraftSampler
from allspan.worker.step.inputs import InputBuffers, StepInputs
from allspan.worker.step.rank_drafter import Drafted, DraftRows, DraftRun, RanStep

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class Target(Protocol):
    """The model whose states a head reads."""

    @property
    def max_model_len(self) -> int: ...

    def features(self, num_tokens: int) -> Tensor:
        """float32 [n, …]: the states of the last step's tokens."""


class Head(Protocol):
    """A draft head whose cache is bound."""

    def forward(self, inputs: StepInputs) -> Tensor:
        """This rank's logits, of the head's own ids; `inputs` have features."""

    def chained(self, num_rows: int) -> Tensor:
        """float32 [m, …]: for each row of logits of the last step, what the row behind its draft reads."""


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Where a head's keys lie, and what its ids are to the model."""

    group: int
    """The number of its cache group, the engine's last."""
    page_size: int
    lifetime: PageLifetime
    num_features: int
    """Elements of a token's features."""
    target_ids: Ints | None = None
    """The model's id for each of the head's; None: they are the same."""


class DraftHead:
    """Proposes what it would say itself, one token behind the other; see
    `allspan.worker.step.rank_drafter.RankDrafter`.

    Its row of a token reads the token's features and the embedding of the next, and predicts the one behind. So it
    takes in a step's tokens when the step is over and the tokens that follow them are known. What it writes for its own
    drafts lies behind the model's tokens, and is written anew when the model has run these.

    The last key of a page depends on the token behind the page: a request that begins with a page of another finds a
    key there that was made for that one's next token. This changes what is drafted, never what is kept.
    """

    follows = True

    def __init__(
        self, head: Head, target: Target, buffers: InputBuffers, place: HeadPlace, sampler: DraftSampler
    ) -> None:
        """`buffers` of the inputs of its steps behind its own drafts; `sampler` draws from its logits."""
        self.lifetimes = (place.lifetime,)
        self.max_model_len = target.max_model_len
        self.model, self._target = head, target
        self._buffers, self._place = buffers, place
        self._sampler = sampler

    def draft(self, runs: Sequence[DraftRun], rows: DraftRows, ran: RanStep) -> Mapping[int, Drafted]:
        asked = {run.row: run.num_drafts for run in runs if run.num_drafts}
        if asked:
            self._sampler.follow(rows)
        ends = ran.inputs.qo_indptr.numpy().astype(np.int64)
        drafting = np.flatnonzero(np.isin(ran.rows, list(asked)))
        numbers = ran.rows[drafting]
        positions = rows.num_tokens[numbers] - 2  # of the last token that the model has run and that is kept
        firsts = ends[drafting]
        wanted = firsts + positions - ran.inputs.positions.numpy()[firsts]
        tokens = self._run(self._followed(rows, ran, ends, wanted), numbers, positions)
        made: dict[int, list[int]] = {row: [] for row in asked}
        while len(numbers):
            for row, token in zip(numbers.tolist(), tokens.tolist(), strict=True):
                made[row].append(token)
            left = np.asarray([asked[row] - len(made[row]) for row in numbers.tolist()])
            going = np.flatnonzero((left > 0) & (tokens >= 0))
            states = self.model.chained(len(numbers))[torch.from_numpy(going)]
            numbers, tokens, positions = numbers[going], tokens[going], positions[going] + 1
            if len(numbers):
                tokens = self._run(self._chained(rows, numbers, positions, tokens, states), numbers, positions)
        return {run.row: Drafted(int(rows.num_tokens[run.row]), tuple(made.get(run.row, ()))) for run in runs}

    def trial(self, count: int, start: int) -> StepInputs:
        row, counts, starts = (np.full(1, value, dtype=np.int64) for value in (0, count, start))
        tables = [np.arange(-(-(start + count) // self._place.page_size), dtype=np.int32)[None]]
        values = paged_values(tables, self.lifetimes, self._place.page_size, row, counts, starts)
        values |= {"ids": np.zeros(count, dtype=np.int32), "logits_rows": np.arange(count)}
        return replace(self._buffers.fill(values), features=torch.zeros(count, self._place.num_features))

    def _followed(self, rows: DraftRows, ran: RanStep, ends: Longs, wanted: Longs) -> StepInputs:
        """The step that takes in what the model has run. Tokens that nothing is known to follow, behind drafts that
        were not kept, have no embedding."""
        of_tokens = np.repeat(ran.rows, np.diff(ends))
        following = ran.inputs.positions.numpy() + 1
        is_known = following < rows.num_tokens[of_tokens]
        ids = np.where(is_known, rows.tokens[of_tokens, np.where(is_known, following, 0)], -1)
        return replace(
            ran.inputs.of_group(self._place.group),
            ids=torch.from_numpy(ids.astype(np.int32)),
            logits_rows=torch.from_numpy(wanted.astype(np.int32)),
            groups=(),
            adapters=None,
            embeddings=None,
            features=self._target.features(len(ids)),
        )

    def _chained(self, rows: DraftRows, numbers: Longs, positions: Longs, ids: Ints, states: Tensor) -> StepInputs:
        """The step of one draft for each of these rows."""
        if (rows.num_pages[-1, numbers] * self._place.page_size <= positions).any():
            raise InternalError("a row is drafted for past its pages of the head")
        counts = np.ones_like(numbers)
        tables = rows.tables[-1:]
        values = paged_values(tables, self.lifetimes, self._place.page_size, numbers, counts, positions)
        inputs = self._buffers.fill(values | {"ids": ids, "logits_rows": np.arange(len(ids))})
        return replace(inputs, features=states, is_chained=True)

    def _run(self, inputs: StepInputs, numbers: Longs, positions: Longs) -> Ints:
        """Returns the model's ids of the drafts for these rows, of which the rows of logits are at these positions;
        negative where none can be drawn."""
        found, ids = self._sampler.sample(self.model.forward(inputs), numbers, positions + 2), self._place.target_ids
        return found if ids is None else np.where(found >= 0, ids[found], found).astype(np.int32)
