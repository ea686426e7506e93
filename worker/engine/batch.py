"""Batch: the running rows as every rank holds them. The leader's plans change it, and nothing else does."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.errors import InternalError
from allspan.worker.backend.cpu.step_inputs import BatchSizes, InputBuffers
from allspan.worker.cache.budget import pages_of
from allspan.worker.engine.inbox import Inbox
from allspan.worker.sampling.sampler import Sampled, Sampler
from allspan.worker.scheduler.plan import Join, Run, StepPlan, StepResult
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.model import PageTiers
from allspan.worker.step.shared_prefix import SharedPages

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """What a step's m rows of logits are for, in their order."""

    rows: Longs
    """[m]: whose they are; a row may have several."""
    positions: Longs
    """[m]: of the token that follows, in its request."""
    targets: Longs | None
    """[m]: that token, where it is a prompt's and known; -1 where it is to be sampled. None: everywhere."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that is launched before the tokens of the one before are known."""

    inputs: StepInputs
    logits: LogitsRows
    num_unknown: int
    """The first so many tokens are such."""


class Batch:
    """Fixed arrays, one row a request. `apply` takes a plan in and makes the model's inputs; `commit` takes in what was
    sampled. The payloads come from the inbox; a row that leaves without being dropped keeps its tokens for its return.
    """

    def __init__(
        self, sizes: BatchSizes, sampler: Sampler, buffers: InputBuffers, tiers: PageTiers | None = None
    ) -> None:
        """`buffers` of the same sizes. `tiers` None: the pages of the device are all there are."""
        self._page_size = sizes.page_size
        self._sampler = sampler
        self._tiers = tiers
        self.buffers = buffers
        rows, pages = sizes.max_rows, pages_of(sizes.max_model_len, sizes.page_size)
        # The system backs these with memory only where they are written.
        self._tokens = np.zeros((rows, sizes.max_model_len), dtype=np.int32)
        self._pages = np.zeros((rows, pages), dtype=np.int32)
        self._num_tokens = np.zeros(rows, dtype=np.int64)
        self._num_computed = np.zeros(rows, dtype=np.int64)
        self._num_pages = np.zeros(rows, dtype=np.int64)
        self._prompt_ends = np.zeros(rows, dtype=np.int64)
        """The prompt's last index for rows that want its log-probabilities, else 0."""
        self._request_ids: list[bytes | None] = [None] * rows
        self._shared = SharedPages(self._pages, sizes.page_size) if buffers.wants_common else None
        self._common: Ints | None = None
        """What the rows of the inputs have in common."""
        self._parked: dict[bytes, Ints] = {}
        self._step = 0
        self._run_rows = np.zeros(0, dtype=np.int64)
        self._run_counts = np.zeros(0, dtype=np.int64)
        self._logits = LogitsRows(self._run_rows, self._run_rows, None)
        self._runs: tuple[Run, ...] = ()
        self._inputs: StepInputs | None = None
        self._sampled = np.zeros(0, dtype=np.int32)
        self._room = 0
        """For so many steps the same rows could go on, a token each, before one of them needs its next page."""
        self._gone_on = 0
        """For so many steps they have gone on; `_num_tokens` and `_num_computed` do not count these."""
        self.tokens_hash = 0

    @property
    def num_rows(self) -> int:
        return sum(request_id is not None for request_id in self._request_ids)

    @property
    def logits(self) -> LogitsRows:
        """What the rows of logits of this step are for."""
        return self._logits

    def apply(self, plan: StepPlan, inbox: Inbox, is_running: bool = False) -> StepInputs | None:
        """Takes a plan in; None when it runs no tokens, or (`is_running`) those of a step that was sent ahead. Raises
        InternalError when it does not fit this rank's state."""
        if plan.tokens_hash != self.tokens_hash:
            raise InternalError(
                f"the ranks have diverged before step {plan.step}: the leader's tokens hash to "
                f"{plan.tokens_hash:08x}, this rank's to {self.tokens_hash:08x}"
            )
        self._step = plan.step
        if self._room and plan.runs == self._runs and not (plan.leaves or plan.joins or plan.grants):
            self._drop(plan, inbox)
            return self._go_on(plan)
        self._settle()
        for row in plan.leaves:
            self._leave(row, plan)
        self._drop(plan, inbox)
        for join in plan.joins:
            self._join(join, inbox)
        for grant in plan.grants:
            first = int(self._num_pages[grant.row])
            self._pages[grant.row, first : first + len(grant.pages)] = grant.pages
            self._num_pages[grant.row] += len(grant.pages)
        if plan.saves or plan.loads:
            self._copy(plan)
        self._runs, self._room = plan.runs, 0
        # Rows with one new token first, which kernels may want; the scheduler mostly has them so.
        runs = sorted(plan.runs, key=lambda run: run.num_tokens > 1)
        self._run_rows = np.fromiter((run.row for run in runs), dtype=np.int64, count=len(runs))
        self._run_counts = np.fromiter((run.num_tokens for run in runs), dtype=np.int64, count=len(runs))
        self._common = None
        if runs and runs[-1].num_tokens == 1 and not is_running:
            self._run_rows, self._common = self._together(tuple(run.row for run in runs), self._num_computed)
        if plan.runs and is_running:
            rows = self._run_rows
            samples = rows[self._num_computed[rows] + self._run_counts == self._num_tokens[rows]]
            self._inputs, self._logits = None, LogitsRows(samples, self._num_tokens[samples], None)
            return None
        self._inputs = self._make_inputs() if plan.runs else None
        return self._inputs

    def ahead(self, plan: StepPlan, order: Longs) -> Ahead:
        """The step after the plan's, before `commit` of this one. Rows that sample now stand first; in the place of
        their ids, which nobody knows yet, the inputs have where each one stands in `order`."""
        computed, num_tokens = self._num_computed.copy(), self._num_tokens.copy()
        computed[self._run_rows] += self._run_counts
        num_tokens[self._logits.rows] += 1
        sampling = set(self._logits.rows.tolist())
        runs = sorted(plan.ahead, key=lambda run: (run.num_tokens > 1, run.row not in sampling))
        rows = np.fromiter((run.row for run in runs), dtype=np.int64, count=len(runs))
        counts = np.fromiter((run.num_tokens for run in runs), dtype=np.int64, count=len(runs))
        unknown, common = sum(run.row in sampling for run in runs), None
        if unknown == len(runs):
            rows, common = self._together(tuple(run.row for run in runs), computed)
        values, logits = self._values(rows, counts, computed, num_tokens)
        at = {row: i for i, row in enumerate(order.tolist())}
        values["ids"][:unknown] = [at[row] for row in rows[:unknown].tolist()]
        return Ahead(self.buffers.fill(values, common), logits, unknown)

    def commit(self, sampled: Sampled | None) -> StepResult:
        """Appends the step's tokens to their rows; None when there were no logits."""
        if not self._gone_on:
            self._num_computed[self._run_rows] += self._run_counts
        if sampled is None:
            return StepResult(self._step, {}, tokens_hash=self.tokens_hash)
        wanted, tokens = self._logits, sampled.tokens
        rows, positions, targets = wanted.rows, wanted.positions, wanted.targets
        failed: dict[int, tuple[int, ...]] = {}
        if targets is not None:
            failed = {int(rows[i]): (int(tokens[i]),) for i in np.flatnonzero((targets >= 0) & (tokens < 0))}
            is_sampled = targets < 0
            rows, positions, tokens = rows[is_sampled], positions[is_sampled], tokens[is_sampled]
        self._tokens[rows, positions] = tokens
        if not self._gone_on:
            self._num_tokens[rows] = positions + 1
        self._sampled = tokens
        self.tokens_hash = zlib.crc32(tokens.tobytes(), zlib.crc32(rows.data, self.tokens_hash))
        made: dict[int, tuple[int, ...]] = {
            row: (token,) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)
        }
        return StepResult(self._step, made | failed, sampled.logprobs, self.tokens_hash, sampled.prompt_logprobs)

    def _together(self, rows: tuple[int, ...], computed: Longs) -> tuple[Longs, Ints | None]:
        """Rows that decode, in the order of the inputs, and what they have in common."""
        if self._shared is None:
            return np.asarray(rows, dtype=np.int64), None
        return self._shared.of(rows, computed)

    def _drop(self, plan: StepPlan, inbox: Inbox) -> None:
        for request_id in plan.drops:
            self._parked.pop(request_id, None)
            inbox.drop(request_id)

    def _copy(self, plan: StepPlan) -> None:
        if self._tiers is None:
            raise InternalError(f"step {plan.step} moves pages to or from a host tier, this rank has none")
        self._tiers.copy(plan.saves, plan.loads)

    def _leave(self, row: int, plan: StepPlan) -> None:
        request_id = self._request_ids[row]
        if request_id is None:
            raise InternalError(f"step {plan.step}: row {row} leaves, but nobody has it")
        if request_id not in plan.drops:
            self._parked[request_id] = self._tokens[row, : self._num_tokens[row]].copy()
        self._request_ids[row] = None
        self._sampler.remove(row)

    def _join(self, join: Join, inbox: Inbox) -> None:
        if self._request_ids[join.row] is not None:
            raise InternalError(f"request {join.request_id.hex()} joins row {join.row}, which is taken")
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
        row = join.row
        self._request_ids[row] = join.request_id
        self._tokens[row, : len(tokens)] = tokens
        self._num_tokens[row] = len(tokens)
        self._num_computed[row] = join.num_computed
        self._num_pages[row] = 0
        if self._shared is not None:
            self._shared.forget()
        self._prompt_ends[row] = prompt_len - 1 if request.wants_prompt_logprobs else 0
        self._sampler.add(row, request.params, prompt_len, self._tokens[row], request.grammar)

    def _go_on(self, plan: StepPlan) -> StepInputs | None:
        """Every row of the last step sampled a token and now runs it: most steps are so, and little changes in them.
        The weights have put everything else out of the caches, so as little as can be is touched."""
        if plan.saves or plan.loads:
            self._copy(plan)
        self._room -= 1
        self._gone_on += 1
        self.buffers.advance(self._sampled)
        positions = self._logits.positions
        positions += 1
        return self._inputs

    def _settle(self) -> None:
        """Makes up for the steps in which the rows went on."""
        if self._gone_on:
            self._num_computed[self._run_rows] += self._gone_on
            self._num_tokens[self._run_rows] += self._gone_on
            self._gone_on = 0

    def _make_inputs(self) -> StepInputs:
        rows = self._run_rows
        values, self._logits = self._values(rows, self._run_counts, self._num_computed, self._num_tokens)
        is_plain = self._logits.targets is None and self.buffers.is_shared
        if is_plain and len(rows) == len(values["ids"]) == len(values["logits_rows"]):
            self._room = self._page_size - 1 - int((values["positions"] % self._page_size).max())
        return self.buffers.fill(values, self._common)

    def _values(
        self, rows: Longs, counts: Longs, computed: Longs, num_tokens: Longs
    ) -> tuple[dict[str, NDArray[Any]], LogitsRows]:
        """The inputs of a step with `counts` more tokens of `rows`, when these have so many tokens, by their numbers,
        of which so many are `computed`; and what its logits are for."""
        starts = computed[rows]
        kv_lens = starts + counts
        page_counts = -(-kv_lens // self._page_size)
        if (page_counts > self._num_pages[rows]).any() or (kv_lens > num_tokens[rows]).any():
            raise InternalError(f"step {self._step}: a row runs past its tokens or its pages")
        qo_indptr, page_indptr = _indptr(counts), _indptr(page_counts)
        token_rows = np.repeat(rows, counts)
        positions = np.arange(qo_indptr[-1]) + np.repeat(starts - qo_indptr[:-1], counts)
        pages, offsets = np.divmod(positions, self._page_size)
        page_rows = np.repeat(rows, page_counts)
        logits_rows, logits = self._choose_logits(rows, token_rows, positions, qo_indptr, num_tokens)
        values = {
            "ids": self._tokens[token_rows, positions],
            "positions": positions,
            "slots": self._pages[token_rows, pages] * self._page_size + offsets,
            "qo_indptr": qo_indptr,
            "page_indptr": page_indptr,
            "page_indices": self._pages[page_rows, _nth(page_indptr)],
            "kv_lens": kv_lens,
            "logits_rows": logits_rows,
        }
        return values, logits

    def _choose_logits(
        self, rows: Longs, token_rows: Longs, positions: Longs, qo_indptr: Longs, num_tokens: Longs
    ) -> tuple[Longs, LogitsRows]:
        """Which of a step's tokens need logits: the last of each row, to sample the next, and those before a prompt
        token whose log-probabilities are wanted."""
        if not self._prompt_ends[rows].any():
            lasts = qo_indptr[1:] - 1
            samples = positions[lasts] + 1 == num_tokens[rows]
            return lasts[samples], LogitsRows(rows[samples], num_tokens[rows[samples]], None)
        following = positions + 1
        is_known = positions < self._prompt_ends[token_rows]
        chosen = np.flatnonzero(is_known | (following == num_tokens[token_rows]))
        rows, following = token_rows[chosen], following[chosen]
        # The buffer's place behind the last token is there (the context leaves room for one), and not looked at.
        targets = np.where(is_known[chosen], self._tokens[rows, following], -1).astype(np.int64)
        return chosen, LogitsRows(rows, following, targets)


def _indptr(counts: Longs) -> Longs:
    """[n + 1]: where each one's entries begin."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def _nth(indptr: Longs) -> Longs:
    """[indptr[-1]]: each entry's number among its own."""
    return np.arange(indptr[-1]) - np.repeat(indptr[:-1], np.diff(indptr))
