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
from allspan.worker.engine.batch.paging import Requests, each_token, indptr_of, paged_values
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
    device: str = "cpu"
    """The torch device of the head."""


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
        self.buffers, self._place = buffers, place
        self._sampler = sampler
        self._target_ids = None if place.target_ids is None else torch.from_numpy(place.target_ids).to(place.device)

    def draft(self, runs: Sequence[DraftRun], rows: DraftRows, ran: RanStep) -> Mapping[int, Drafted]:
        asked = {run.row: run.num_drafts for run in runs if run.num_drafts}
        if asked:
            self._sampler.follow(rows)
        places = {row: place for place, row in reversed([*enumerate(ran.rows.tolist())])}  # a row's drafts come behind
        ordered = sorted((row for row in asked if row in places), key=lambda row: (-asked[row], places[row]))
        numbers, counts = np.asarray(ordered, dtype=np.int64), np.asarray([asked[row] for row in ordered])
        positions = rows.num_tokens[numbers] - 2  # of the last token that the model has run and that is kept
        firsts = np.asarray([places[row] for row in ordered], dtype=np.int64)
        wanted = indptr_of(ran.counts)[firsts] + positions - ran.starts[firsts]
        logits = self.model.forward(self._followed(rows, ran, wanted))

        def behind(depth: int, tokens: Tensor) -> Tensor:
            count = len(tokens)
            ids = tokens if self._target_ids is None else self._target_ids[tokens.long()]
            return self.model.forward(self._chained(rows, numbers[:count], positions[:count] + depth, ids))

        made = self._sampler.chain(logits, numbers, positions + 2, counts, behind)
        if (target_ids := self._place.target_ids) is not None:
            made = {row: tuple(target_ids[list(tokens)].tolist()) for row, tokens in made.items()}
        return {run.row: Drafted(int(rows.num_tokens[run.row]), made.get(run.row, ())) for run in runs}

    def follow(self, rows: DraftRows, ran: RanStep, tokens: Tensor | None) -> None:
        inputs = self._followed(rows, ran, np.zeros(0, dtype=np.int64))
        if tokens is not None:
            inputs.ids.index_copy_(0, ran.inputs.logits_rows[: len(tokens)].long(), tokens)
        self.model.forward(inputs)

    def trial(self, count: int, start: int) -> StepInputs:
        row, counts, starts = (np.full(1, value, dtype=np.int64) for value in (0, count, start))
        requests = each_token(row, counts, starts) if self.buffers.splits_drafts else (row, counts, starts)
        tables = [np.arange(-(-(start + count) // self._place.page_size), dtype=np.int32)[None]]
        inputs = self._fill(tables, requests, np.zeros(count, dtype=np.int32), np.arange(count))
        return replace(inputs, features=torch.zeros(count, self._place.num_features, device=self._place.device))

    def _followed(self, rows: DraftRows, ran: RanStep, wanted: Longs) -> StepInputs:
        """The step that takes in what the model has run. Tokens that nothing is known to follow, behind drafts that
        were not kept, have no embedding."""
        of_tokens, _, positions = each_token(ran.rows, ran.counts, ran.starts)
        following = positions + 1
        is_known = following < rows.num_tokens[of_tokens]
        ids = np.where(is_known, rows.tokens[of_tokens, np.where(is_known, following, 0)], -1).astype(np.int32)
        features = self._target.features(len(ids))
        if self.buffers.splits_drafts:  # its steps are padded, at addresses of their own
            inputs = self._fill(rows.tables[-1:], (ran.rows, ran.counts, ran.starts), ids, wanted)
            if not len(wanted):  # op by op, without those that make logits, which what is recorded has
                inputs = replace(inputs, bucket=0, logits_rows=inputs.logits_rows[:0])
            return replace(inputs, features=features)
        return replace(
            ran.inputs.of_group(self._place.group),
            ids=torch.from_numpy(ids).to(self._place.device),
            logits_rows=torch.from_numpy(wanted.astype(np.int32)).to(self._place.device),
            groups=(),
            adapters=None,
            embeddings=None,
            features=features,
        )

    def _chained(self, rows: DraftRows, numbers: Longs, positions: Longs, ids: Tensor) -> StepInputs:
        """The step of one draft for each of these rows, which are the first of the step before."""
        if (rows.num_pages[-1, numbers] * self._place.page_size <= positions).any():
            raise InternalError("a row is drafted for past its pages of the head")
        states, zeros = self.model.chained(len(numbers)), np.zeros(len(numbers), dtype=np.int32)
        requests = numbers, np.ones_like(numbers), positions
        inputs = self._fill(rows.tables[-1:], requests, zeros, np.arange(len(numbers)))
        inputs.ids[: len(ids)].copy_(ids)  # drafts are on the device, perhaps there alone
        return replace(inputs, features=states, is_chained=True)

    def _fill(self, tables: Sequence[Ints], requests: Requests, ids: Ints, wanted: Longs) -> StepInputs:
        values = paged_values(tables, self.lifetimes, self._place.page_size, *requests)
        return self.buffers.fill(values | {"ids": ids, "logits_rows": wanted})
