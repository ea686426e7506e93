"""A rank without tensors: it carries plans out on pages that remember which tokens were written where.

The KV of a token is the fold of all tokens of its request up to it, so that a page says exactly what it holds. Whatever
a plan reads must be what the request's tokens would have written, and what it writes must be nobody else's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from allspan.protos.api.errors import AllspanError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.lookahead import Lookahead
from allspan.worker.scheduler.owned_pages import OwnedPages
from allspan.worker.scheduler.page_manager import PrefixSettings
from allspan.worker.scheduler.plan import Join, StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.scheduler import Outcome, Scheduler
from support.cores import request


def fold(before: int, token: int) -> int:
    return (before * 6364136223846793005 + token + 1442695040888963407) % 2**64


def folds(tokens: Sequence[int], start: int = 1) -> list[int]:
    values = []
    for token in tokens:
        start = fold(start, token)
        values.append(start)
    return values


def next_token(tokens: Sequence[int], vocab_size: int = 97) -> int:
    """What the pretended model says after these tokens."""
    return folds(tokens)[-1] % vocab_size


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class _Row:
    def __init__(self, request: Request, tokens: list[int], num_computed: int, owner: int) -> None:
        self.request = request
        self.owner = owner
        self.tokens = tokens
        self.num_computed = num_computed
        self.pages: dict[int, dict[int, int]] = defaultdict(dict)
        """By cache group: place → page, of the places that later tokens see."""


@dataclasses.dataclass
class _Flight:
    """A step that was carried out and is not told yet."""

    result: StepResult
    rows: dict[int, _Row]
    """Those that ran."""


def samples_ahead(params: SamplingParams) -> bool:
    return params.prompt_logprobs is None


class SimulatedRank:
    """All attention ranks at once, each with pages of its own. `step()` runs one round of the scheduler's loop.
    `tokens`, `prompt_logprobs` and `ends` are what callers were told, by request id; saying anything after an end
    fails."""

    def __init__(self, scheduler: Scheduler, num_host_pages: int = 0) -> None:
        self.scheduler = scheduler
        self.flights: deque[_Flight] = deque()
        """What steps made is told as late as the scheduler's lookahead lets it."""
        self.size = scheduler.limits.page_size
        self.groups = scheduler.limits.groups(num_host_pages)
        memory = scheduler.memory
        self.managers = memory.managers if isinstance(memory, OwnedPages) else (memory,)
        places = [(owner, i, group) for owner in range(len(self.managers)) for i, group in enumerate(self.groups)]
        self.device = {(owner, i): [[0] * self.size for _ in range(group.num_pages)] for owner, i, group in places}
        self.host = {(owner, i): [[0] * self.size for _ in range(group.num_host_pages)] for owner, i, group in places}
        """Pages by owner and cache group."""
        self.rows: dict[int, _Row] = {}
        self.known: dict[bytes, Request] = {}
        self.parked: dict[bytes, list[int]] = {}
        self.dropped: set[bytes] = set()
        self.tokens: dict[bytes, list[int]] = {}
        self.prompt_logprobs: dict[bytes, list[float]] = {}
        self.ends: dict[bytes, str | AllspanError] = {}
        self.num_computed = 0
        self.plans: list[StepPlan] = []
        self.between: Callable[[], None] = lambda: None
        """Called while a step is in flight."""

    def submit(self, request: Request) -> Request:
        self.scheduler.submit(request)
        self.known[request.request_id] = request
        self.tokens[request.request_id] = list(request.output_token_ids)
        self.prompt_logprobs[request.request_id] = []
        return request

    def cancel(self, request: Request) -> None:
        outcome = self.scheduler.cancel(request.request_id)
        if outcome is not None:
            self.take([outcome])

    def step(self) -> StepPlan | None:
        self.take(self.scheduler.expire())
        newest = None
        while len(self.flights) < self.scheduler.lookahead.depth and (plan := self.scheduler.schedule()) is not None:
            assert plan.in_flight == len(self.flights)
            self.plans.append(plan)
            self._apply(plan)
            result = self._run(plan)
            self.flights.append(_Flight(result, {run.row: self.rows[run.row] for run in plan.runs}))
            newest = plan
        if not self.flights:
            return None
        self.between()
        self._land()
        self.scheduler.check()
        if (log := self.scheduler.memory.log) is not None:
            caches = [manager.groups[manager._logged].cache for manager in self.managers]
            in_host = {key for cache in caches if cache.host for key in cache.host._page_of}
            on_device = {key for cache in caches for key in cache.device._page_of}
            told = dict(log.snapshot()[0])
            assert told.keys() == on_device | in_host
            assert {key for key, page in told.items() if page[2]} == in_host - on_device
        return newest or self.plans[-1]

    def _land(self) -> None:
        """Tells what the oldest step made of rows that are still the same request's."""
        flight = self.flights.popleft()
        mine = {row for row, state in flight.rows.items() if self.rows.get(row) is state}
        kept = {row: tokens for row, tokens in flight.result.tokens.items() if row in mine}
        prompt = {row: entries for row, entries in flight.result.prompt_logprobs.items() if row in mine}
        self.take(self.scheduler.apply(dataclasses.replace(flight.result, tokens=kept, prompt_logprobs=prompt)))

    def run(self, most: int = 20_000) -> int:
        for count in range(most):
            if self.step() is None:
                return count
        raise AssertionError("no end")

    def take(self, outcomes: Sequence[Outcome]) -> None:
        for one, outcome in outcomes:
            key = one.request_id
            assert key not in self.ends, "a request ends once and says nothing after"
            if isinstance(outcome, AllspanError):
                self.ends[key] = outcome
                continue
            assert outcome != Output(), "nothing is told"
            self.tokens[key] += outcome.token_ids
            self.prompt_logprobs[key] += [entry.logprob for entry in outcome.prompt_logprobs]
            if outcome.finish_reason:
                self.ends[key] = outcome.finish_reason

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.leaves:
            left = self.rows.pop(row)
            self.parked[left.request.request_id] = left.tokens
        for request_id in plan.drops:
            assert request_id not in self.dropped
            self.dropped.add(request_id)
            self.parked.pop(request_id, None)
        for join in plan.joins:
            self._join(join)
        for grant in plan.grants:
            self.rows[grant.row].pages[grant.group] |= dict(enumerate(grant.pages, start=grant.first))
        for copy in plan.saves:
            place = copy.owner, copy.group
            self.host[place][copy.target] = list(self.device[place][copy.source])
        for copy in plan.loads:
            place = copy.owner, copy.group
            self.device[place][copy.target] = list(self.host[place][copy.source])

    def _join(self, join: Join) -> None:
        assert join.row not in self.rows
        request = self.known[join.request_id]
        payload = [*request.prompt_token_ids, *request.output_token_ids[: request.num_resumed]]
        tokens = self.parked.pop(join.request_id, payload)
        assert join.num_output == len(tokens) - len(request.prompt_token_ids)
        assert join.num_computed < len(tokens), "the last token is always computed"
        assert join.num_computed % self.size == 0
        self.rows[join.row] = _Row(request, list(tokens), join.num_computed, join.owner)

    def _run(self, plan: StepPlan) -> StepResult:
        limits = self.scheduler.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len({run.row for run in plan.runs}) == len(plan.runs)
        sampled: dict[int, tuple[int, ...]] = {}
        prompt: dict[int, tuple[TokenLogprob, ...]] = {}
        drafts = dict(plan.drafts)
        for row, proposed in drafts.items():
            self.rows[row].tokens += proposed
        for run in plan.runs:
            self._write(self.rows[run.row], run.num_tokens)
        for run in plan.runs:
            row = self.rows[run.row]
            start, row.num_computed = row.num_computed, row.num_computed + run.num_tokens
            self._check(row, start)
            if row.request.wants_prompt_logprobs:
                ends = min(row.num_computed, len(row.request.prompt_token_ids) - 1)
                entries = tuple(TokenLogprob(float(position + 1)) for position in range(start, ends))
                prompt |= {run.row: entries} if entries else {}
            if row.num_computed == len(row.tokens):
                sampled[run.row] = self._sample(row, len(drafts.get(run.row, ())))
            self._forget(row, run.row in drafts)
        num_sampled = len(sampled) + sum(map(len, drafts.values()))
        assert num_sampled + sum(map(len, prompt.values())) <= limits.max_logits_rows
        self.num_computed += plan.num_tokens
        return StepResult(plan.step, sampled, tokens_hash=plan.step, prompt_logprobs=prompt)

    def _sample(self, row: _Row, num_drafts: int) -> tuple[int, ...]:
        """Keeps the drafts at the row's end that are what it says, and adds the next token."""
        first = len(row.tokens) - num_drafts
        drafts, row.tokens = row.tokens[first:], row.tokens[:first]
        row.tokens.append(next_token(row.tokens))
        for draft in drafts:
            if row.tokens[-1] != draft:
                break
            row.tokens.append(next_token(row.tokens))
        row.num_computed = len(row.tokens) - 1
        return tuple(row.tokens[first:])

    def _forget(self, row: _Row, had_drafts: bool) -> None:
        """Places before what later tokens see, and those behind drafts that were not kept, were given back."""
        last = -(-len(row.tokens) // self.size) if had_drafts else sys.maxsize
        for index, group in enumerate(self.groups):
            first, pages = group.lifetime.first_seen(row.num_computed) // self.size, row.pages[index]
            for place in [place for place in pages if not first <= place < last and not group.lifetime.is_state]:
                del pages[place]

    def _write(self, row: _Row, count: int) -> None:
        assert 1 <= count <= len(row.tokens) - row.num_computed
        values = folds(row.tokens[: row.num_computed + count])
        for index, group in enumerate(self.groups):
            pool = self.managers[row.owner].groups[index].cache.device
            others = [other for other in self.rows.values() if other.owner == row.owner]
            for position in range(row.num_computed, row.num_computed + count):
                place = 0 if group.lifetime.is_state else position // self.size
                page = row.pages[index][place]
                holders = sum(page in other.pages[index].values() for other in others)
                assert holders == pool.references(page) == 1, "a page that is shared is written"
                self.device[row.owner, index][page][position % self.size] = values[position]

    def _check(self, row: _Row, start: int) -> None:
        """What the queries from `start` on see is the request's own."""
        values = folds(row.tokens[: row.num_computed])
        for index, group in enumerate(self.groups):
            pages, last = row.pages[index], row.num_computed
            if group.lifetime.is_state:
                assert self.device[row.owner, index][pages[0]][(last - 1) % self.size] == values[-1]
                continue
            for position in range(group.lifetime.first_seen(start), last):
                found = self.device[row.owner, index][pages[position // self.size]][position % self.size]
                assert found == values[position], "a page holds another request's KV"


LIMITS = Limits(
    vocab_size=97,
    max_model_len=64,
    page_size=4,
    num_pages=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_queued_requests=1000,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rank(
    host: int = 0, clock: Clock | None = None, enabled: bool = True, depth: int = 1, **limits: Any
) -> SimulatedRank:
    settings = PrefixSettings(enabled, "model", host)
    sizes, lookahead = dataclasses.replace(LIMITS, **limits), Lookahead(depth, samples_ahead)
    scheduler = Scheduler(sizes, (), prefix=settings, clock=clock or Clock(), lookahead=lookahead)
    return SimulatedRank(scheduler, host)


def asked(
    number: int, prompt: list[int], resumed: int = 0, options: RequestOptions | None = None, **params: object
) -> Request:
    """`resumed` tokens of its output come with the payload."""
    one = request(number, prompt, **params)
    one.options = options or RequestOptions()
    one.output_token_ids = continuation(prompt, resumed)
    one.num_resumed = resumed
    return one
