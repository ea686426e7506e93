"""Batch: the running rows as every rank holds them. The leader's plans change it, and nothing else does."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.engine.batch.batch_step import BatchStep, DecodeRun, LogitsRows
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.engine.batch.owners import Owners
from allspan.worker.engine.batch.paging import Requests, indptr_of, paged_values
from allspan.worker.engine.batch.pooling import PooledStep, RowPool, pooled_step
from allspan.worker.engine.batch.rows import Ints, Longs, RowStates
from allspan.worker.engine.batch.single_request import SingleRequestSteps
from allspan.worker.sampling.result import Sampled
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.scheduler.plan import Grant, Join, StepPlan, StepResult
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import EmbeddingRows, InputBuffers, StepInputs, axis_names
from allspan.worker.step.model import PageTiers, RankAdapters
from allspan.worker.step.rank_drafter import DraftRows, RanStep
from allspan.worker.step.row_inputs import RowInputs
from allspan.worker.step.shared_prefix import SharedPages


class Batch:
    """Fixed arrays, one row a request. `apply` takes a plan in and makes the model's inputs; `commit` takes in what was
    sampled. The payloads come from the inbox; a row that leaves without being dropped keeps its tokens for its return.
    """

    def __init__(
        self,
        sizes: BatchSizes,
        sampler: Sampler,
        buffers: InputBuffers,
        tiers: PageTiers | None = None,
        adapters: RankAdapters | None = None,
    ) -> None:
        """`buffers` of the same sizes. `tiers` None: the pages of the device are all there are. `adapters` None:
        requests have none."""
        self._lifetimes = sizes.lifetimes
        self._adapters = adapters
        self._owners = Owners(sizes)
        self._row_inputs = RowInputs(
            num_positions=sizes.num_positions, prompt_lengths=sizes.prompt_lengths, scorer=sizes.scorer
        )
        self._page_size = sizes.page_size
        self._sampler = sampler
        self._tiers = tiers
        self.buffers = buffers
        self._rows = RowStates(sizes, (*sizes.lifetimes, *sizes.drafter_lifetimes))
        self._shared = SharedPages(self._rows.tables[0], sizes.page_size) if buffers.wants_common else None
        is_simple = buffers.is_shared and not buffers.splits_drafts and SingleRequestSteps.serves(sizes)
        self._single = SingleRequestSteps(self._rows, sizes) if is_simple else None
        self._parked: dict[bytes, Ints] = {}
        """Tokens of preempted requests."""
        self._decodes: DecodeRun | None = None
        self._pools: dict[int, RowPool] = {}
        """Rows that get a vector instead of tokens."""
        self.tokens_hash = 0

    @property
    def rows(self) -> DraftRows:
        """The running rows between two steps, as a drafter in the ranks sees them."""
        self.part()
        return self._rows

    @property
    def num_rows(self) -> int:
        return sum(request_id is not None for request_id in self._rows.request_ids)

    def apply(self, plan: StepPlan, inbox: Inbox, newest: BatchStep | None = None) -> BatchStep:
        """Takes a plan in. `newest`: the last step that is still in flight. Raises InternalError when the plan does not
        fit this rank's state."""
        if plan.tokens_hash != self.tokens_hash:
            raise InternalError(
                f"the ranks have diverged before step {plan.step}: the leader's tokens hash to "
                f"{plan.tokens_hash:08x}, this rank's to {self.tokens_hash:08x}"
            )
        self._drop(plan, inbox)
        if self._decodes is not None:
            if self._decodes.continues(plan):
                self._copy(plan)
                return self._decodes.advance(plan, self.buffers)
            self._decodes.settle(self._rows)
            self._decodes = None
        for row in plan.leaves:
            self._leave(row, plan)
        self._place(plan)
        for join in plan.joins:
            self._join(join, inbox)
        for grant in plan.grants:
            self._rows.grant(grant)
        self._copy(plan)
        if not plan.runs:
            nothing = np.zeros(0, dtype=np.int64)
            return BatchStep(plan.step, None, LogitsRows(nothing, nothing), self._rows.leaves.count)
        return self._begin(plan, newest)

    def trial(self, count: int, start: int) -> StepInputs:
        """The inputs of a step with `count` tokens of one request behind `start` others, all with logits. For the time
        before the first plan: its pages are the first ones, and the rows are left as they were."""
        state, row = self._rows, np.zeros(1, dtype=np.int64)
        state.enter(0, b"", np.zeros(start + 1, dtype=np.int32), start)
        state.draft(0, [0] * (count - 1))
        for group, lifetime in enumerate(self._lifetimes):
            pages = 1 if lifetime.is_state else -(-(start + count) // self._page_size)
            state.grant(Grant(0, tuple(range(pages)), group))
        counts = np.full(1, count, dtype=np.int64)
        values, _ = self._values(0, row, counts)
        inputs = self._fill(self._requests(row, counts, values), row, counts, values)
        state.num_drafts[0] = 0
        state.leave(0)
        return inputs

    def part(self) -> None:
        """Says after `apply` that the next step is of other rows: this one's are not advanced in place."""
        if self._decodes is not None:
            self._decodes.settle(self._rows)
            self._decodes = None

    def commit(
        self, step: BatchStep, sampled: Sampled | None, hidden: Tensor | None = None, pooled: Tensor | None = None
    ) -> StepResult:
        """Appends a step's tokens to their rows, the oldest step first; None when there were no logits. Rows that have
        left since the step began are passed over. `pooled`: the hidden states of rows with pooling, on the host."""
        vectors: dict[int, bytes] = {}
        if step.pooled is not None and pooled is not None:
            vectors = step.pooled.commit(pooled.numpy())
        if sampled is None:
            return StepResult(step.number, {}, tokens_hash=self.tokens_hash, vectors=vectors)
        wanted, tokens, logprobs = step.logits, sampled.tokens, sampled.logprobs
        rows, positions, targets = wanted.rows, wanted.positions, wanted.targets
        failed: dict[int, tuple[int, ...]] = {}
        if targets is not None:
            failed = {int(rows[i]): (int(tokens[i]),) for i in np.flatnonzero((targets >= 0) & (tokens < 0))}
            is_sampled = targets < 0
            rows, positions, tokens = rows[is_sampled], positions[is_sampled], tokens[is_sampled]
        if step.num_leaves != self._rows.leaves.count:
            stayed = self._rows.leaves.stayed(rows, step.num_leaves)
            rows, positions, tokens = rows[stayed], positions[stayed], tokens[stayed]
            logprobs = {row: logprobs[row] for row in rows.tolist() if row in logprobs}
        made: dict[int, tuple[int, ...]] = {
            row: (token,) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)
        }
        for row in step.drafted:
            made[row] = self._accept(row, tokens[rows == row].tolist())
        self._rows.tokens[rows, positions] = tokens
        if self._decodes is not None:
            self._decodes.sampled = tokens
        self.tokens_hash = zlib.crc32(tokens.tobytes(), zlib.crc32(rows.data, self.tokens_hash))
        states: dict[int, tuple[float, ...]] = {}
        if hidden is not None:
            rows_of_states = zip(step.hidden, hidden.tolist(), strict=True)
            states = {row: tuple(state) for row, state in rows_of_states if row in made}
        lists = sampled.prompt_logprobs, states, vectors
        return StepResult(step.number, made | failed, logprobs, self.tokens_hash, *lists)

    def _begin(self, plan: StepPlan, newest: BatchStep | None) -> BatchStep:
        """The inputs of a plan's runs: decodes first, as kernels may need, and of those the rows whose token `newest`
        is still sampling."""
        state = self._rows
        unknown: dict[int, int] = {}
        split = {row for row, _ in plan.drafts} if self.buffers.splits_drafts else ()
        for row, drafts in plan.drafts:
            self._sampler.begin_drafts(row, state.draft(row, drafts))
        if self._single and newest is None and not self._pools and self._single.takes(plan):
            step, self._decodes = self._single.begin(plan, self.buffers)
            return step
        if newest is not None:
            sampling = newest.logits.rows
            stayed = state.leaves.stayed(sampling, newest.num_leaves)
            unknown = {row: i for i, row in enumerate(sampling.tolist()) if stayed[i]}
        runs = sorted(plan.runs, key=lambda run: (run.num_tokens > 1 and run.row not in split, run.row not in unknown))
        rows = np.fromiter((run.row for run in runs), dtype=np.int64, count=len(runs))
        counts = np.fromiter((run.num_tokens for run in runs), dtype=np.int64, count=len(runs))
        num_unknown = sum(run.row in unknown for run in runs) if unknown else 0
        common: Ints | None = None
        is_decode = runs[-1].num_tokens == 1 and not plan.drafts
        if self._shared is not None and is_decode and num_unknown in (0, len(runs)):
            rows, common = self._shared.of(tuple(run.row for run in runs), state.num_computed)
        values, logits = self._values(plan.step, rows, counts)
        if num_unknown:
            values["ids"][:num_unknown] = [unknown[row] for row in rows[:num_unknown].tolist()]
        pooled = self._pool(rows, values, len(logits.rows)) if self._pools else None
        requests = self._requests(rows, counts, values)
        inputs = self._fill(requests, rows, counts, values, common)
        if state.embeddings:
            inputs = replace(inputs, embeddings=self._embeddings(rows, values))
        step = BatchStep(plan.step, inputs, logits, state.leaves.count, num_unknown)
        step.drafted, step.pooled = tuple(row for row, _ in plan.drafts), pooled
        step.ran = RanStep(inputs, *requests)
        if state.hidden:
            ended = state.hidden.intersection(logits.sampling.tolist())  # these prompts end in this step
            step.hidden = {row: i for i, row in enumerate(logits.rows.tolist()) if row in ended}
            state.hidden -= ended
        is_plain = self.buffers.is_shared and inputs.embeddings is None and not step.hidden
        is_plain = is_plain and not state.needs_prompt_positions(rows)
        state.num_computed[rows] += counts
        state.num_tokens[logits.sampling] += 1
        if is_plain and logits.targets is None and len(rows) == len(values["ids"]) == len(logits.rows):
            room = self._page_size - 1 - int((values["positions"] % self._page_size).max())
            self._decodes = DecodeRun(plan.runs, step, room)
        return step

    def _requests(self, rows: Longs, counts: Longs, values: dict[str, NDArray[Any]]) -> Requests:
        """A step's requests as attention sees them, of which each draft may be one of its own: `values` of its runs,
        `counts` tokens of each of `rows`."""
        starts, drafts = self._rows.num_computed[rows], self._rows.num_drafts[rows]
        if self.buffers.splits_drafts and drafts.any():
            rows, counts = np.repeat(rows, 1 + drafts), np.repeat(np.where(drafts, 1, counts), 1 + drafts)
            starts = values["positions"][np.cumsum(counts) - counts]
        return rows, counts, starts

    def _fill(
        self,
        requests: Requests,
        rows: Longs,
        counts: Longs,
        values: dict[str, NDArray[Any]],
        common: Ints | None = None,
    ) -> StepInputs:
        """The step as the model reads it: `values` of its runs, `counts` tokens of each of `rows`, and what attention
        reads of `requests`."""
        adapters = np.repeat(self._rows.adapters[rows], counts) if self._adapters is not None else rows[:0]
        given = values | self._attention_values(*requests)
        if adapters.max(initial=-1) >= 0:
            given["adapters"] = adapters
        return self.buffers.fill(given, common, len(requests[0]))

    def _pool(self, rows: Longs, values: dict[str, NDArray[Any]], num_sampled: int) -> PooledStep | None:
        """What a step's rows pool of it; the tokens that they read go behind the `num_sampled` rows of logits."""
        starts = self._rows.num_computed[rows]
        tokens, pooled = pooled_step(self._pools, rows, starts, values["qo_indptr"], num_sampled)
        values["logits_rows"] = np.concatenate((values["logits_rows"], tokens))
        return pooled if pooled.parts else None

    def _accept(self, row: int, sampled: list[int]) -> tuple[int, ...]:
        """The row's new tokens: drafts that agree with what was sampled, and the first that was sampled instead."""
        kept = self._rows.accept(row, sampled)
        self._sampler.retract(row, int(self._rows.num_tokens[row]) - 1)
        return tuple(sampled[: kept + 1])

    def _drop(self, plan: StepPlan, inbox: Inbox) -> None:
        for request_id in plan.drops:
            self._parked.pop(request_id, None)
            inbox.drop(request_id)

    def _place(self, plan: StepPlan) -> None:
        for slot, adapter in plan.placements:
            if self._adapters is None:
                raise InternalError(f"step {plan.step} places an adapter, this rank takes none")
            self._adapters.place(slot, adapter)

    def _copy(self, plan: StepPlan) -> None:
        if not (plan.saves or plan.loads):
            return
        if self._tiers is None:
            raise InternalError(f"step {plan.step} moves pages to or from a host tier, this rank has none")
        self._tiers.copy(self._owners.copies(plan.saves), self._owners.copies(plan.loads))

    def _leave(self, row: int, plan: StepPlan) -> None:
        request_id = self._rows.request_ids[row]
        if request_id is None:
            raise InternalError(f"step {plan.step}: row {row} leaves, but no request has it")
        if request_id not in plan.drops:
            self._parked[request_id] = self._rows.tokens[row, : self._rows.num_tokens[row]].copy()
        self._rows.leave(row)
        self._pools.pop(row, None)
        self._sampler.remove(row)

    def _join(self, join: Join, inbox: Inbox) -> None:
        row, state = join.row, self._rows
        if state.request_ids[row] is not None:
            raise InternalError(f"request {join.request_id.hex()} joins row {row}, which is taken")
        request = inbox.take(join.request_id, join.digest)
        prompt_len = len(request.prompt_token_ids)
        tokens = self._parked.pop(join.request_id, None)
        if tokens is None:
            resumed = request.output_token_ids[: request.num_resumed]
            tokens = np.asarray((*request.prompt_token_ids, *resumed), dtype=np.int32)
        if len(tokens) != prompt_len + join.num_output:
            raise InternalError(
                f"request {join.request_id.hex()} joins with {join.num_output} output tokens, this rank has "
                f"{len(tokens) - prompt_len}"
            )
        state.enter(row, join.request_id, tokens, join.num_computed)
        state.adapters[row], state.params[row] = join.adapter, request.params
        self._owners.enter(row, join.owner)
        if request.embeddings is not None:
            state.embeddings[row] = request.embeddings
        if request.positions is not None:
            state.positions[row] = request.positions
        state.first_rotary_rows[row] = self._row_inputs.table_of(prompt_len) * state.tokens.shape[1]
        if request.options.pooling:
            scorer = self._row_inputs.scorer
            self._pools[row] = RowPool(request.options.pooling, prompt_len, scorer.weight if scorer else None)
        if request.wants_hidden_state and not join.num_output:
            state.hidden.add(row)
        state.prompt_ends[row] = prompt_len - 1 if request.wants_prompt_logprobs else 0
        if self._shared is not None:
            self._shared.forget()
        self._sampler.add(row, request.params, prompt_len, state.tokens[row], request.grammar)

    def _values(self, step: int, rows: Longs, counts: Longs) -> tuple[dict[str, NDArray[Any]], LogitsRows]:
        """The tokens of a step with `counts` more of `rows`, and what its logits are for."""
        state = self._rows
        starts = state.num_computed[rows]
        kv_lens = starts + counts
        page_counts = -(-kv_lens // self._page_size)
        if self._lacks_pages(rows, page_counts) or (kv_lens > state.num_tokens[rows] + state.num_drafts[rows]).any():
            raise InternalError(f"step {step}: a row runs past its tokens or its pages")
        qo_indptr, token_rows = indptr_of(counts), np.repeat(rows, counts)
        positions = np.arange(qo_indptr[-1]) + np.repeat(starts - qo_indptr[:-1], counts)
        logits_rows, logits = self._choose_logits(rows, token_rows, positions, qo_indptr)
        values = {
            "ids": state.tokens[token_rows, positions],
            "positions": positions,
            "qo_indptr": qo_indptr,
            "kv_lens": kv_lens,
            "logits_rows": logits_rows,
        }
        return values, logits

    def _attention_values(self, rows: Longs, counts: Longs, starts: Longs) -> dict[str, NDArray[Any]]:
        """What attention reads of `counts` tokens of `rows` behind `starts` others; where ranks attend for requests of
        their own, of this rank's alone."""
        state = self._rows
        given: dict[str, NDArray[Any]] = {}
        if (is_own := self._owners.own(rows)) is not None:
            of_own = np.repeat(is_own, counts)
            given = {"own_rows": np.flatnonzero(of_own), "own_places": np.where(of_own, np.cumsum(of_own) - 1, -1)}
            rows, counts, starts = rows[is_own], counts[is_own], starts[is_own]
        tables = state.tables[: len(self._lifetimes)]
        given |= paged_values(tables, self._lifetimes, self._page_size, rows, counts, starts)
        token_rows, positions = np.repeat(rows, counts), given["positions"]
        if names := axis_names(self._row_inputs.num_positions):
            given |= zip(names, state.axes(token_rows, positions), strict=True)
        if self._row_inputs.prompt_lengths:  # the rows of the rotary tables instead of the tokens' indices
            given["positions"] = positions + np.repeat(state.first_rotary_rows[rows], counts)
        return given

    def _embeddings(self, rows: Longs, values: dict[str, NDArray[Any]]) -> EmbeddingRows | None:
        """The embedding rows among a step's tokens."""
        places, found = [], []
        for row, first in zip(rows.tolist(), values["qo_indptr"].tolist(), strict=False):
            if embeddings := self._rows.embeddings.get(row):
                count = int(values["kv_lens"][rows == row][0]) - int(values["positions"][first])
                positions = values["positions"][first : first + count] - embeddings.first
                at = np.flatnonzero((positions >= 0) & (positions < len(embeddings.rows)))
                places.append(first + at)
                found.append(embeddings.rows[positions[at]])
        if not sum(map(len, places)):
            return None
        return EmbeddingRows(
            torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(found).astype(np.float32))
        )

    def _lacks_pages(self, rows: Longs, page_counts: Longs) -> bool:
        return any(
            (self._rows.num_pages[group, rows] < (1 if lifetime.is_state else page_counts)).any()
            for group, lifetime in enumerate(self._lifetimes)
        )

    def _choose_logits(
        self, rows: Longs, token_rows: Longs, positions: Longs, qo_indptr: Longs
    ) -> tuple[Longs, LogitsRows]:
        """Which of a step's tokens need logits: the last of each row and its drafts, to sample the next, and those
        before a prompt token whose log-probabilities are wanted."""
        num_tokens, prompt_ends = self._rows.num_tokens, self._rows.prompt_ends
        has_prompts = prompt_ends[rows].any()
        if not has_prompts and not self._rows.num_drafts[rows].any():
            lasts = qo_indptr[1:] - 1
            samples = positions[lasts] + 1 == num_tokens[rows]
            if self._pools:
                samples &= self._samples(rows)
            return lasts[samples], LogitsRows(rows[samples], num_tokens[rows[samples]])
        following = positions + 1
        is_known = positions < prompt_ends[token_rows]
        samples = following >= num_tokens[token_rows]
        if self._pools:
            samples &= self._samples(token_rows)
        chosen = np.flatnonzero(is_known | samples)
        rows, following = token_rows[chosen], following[chosen]
        if not has_prompts:
            return chosen, LogitsRows(rows, following)
        # The buffer's place behind the last token is there (the context leaves room for one), and not looked at.
        targets = np.where(is_known[chosen], self._rows.tokens[rows, following], -1).astype(np.int64)
        return chosen, LogitsRows(rows, following, targets)

    def _samples(self, rows: Longs) -> NDArray[np.bool_]:
        """Which of these rows get tokens."""
        return ~np.isin(rows, list(self._pools))
