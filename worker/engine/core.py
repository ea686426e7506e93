"""EngineCore: the step loop of one rank, leader or follower.

The leader's loop is `schedule → publish → execute → apply → deliver`, a follower's `receive → execute`. Whatever goes
wrong in it ends the world: the ranks would no longer agree.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from allspan.protos.api.counters import EngineCounters
from allspan.protos.api.errors import InternalError, InvalidRequest, QueueFull, Unavailable
from allspan.protos.config.settings import WorkerConfig
from allspan.protos.config.speculation import Speculation
from allspan.worker.cache.page_log import PageLog
from allspan.worker.engine.batch.batch import Batch
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.engine.live_adapters import LiveAdapters
from allspan.worker.engine.operations import Operations
from allspan.worker.engine.status import EngineState, EngineStatus
from allspan.worker.engine.steps.loop import Progress, StepLoop
from allspan.worker.engine.steps.planner import LeaderPlanner, OnOutputs
from allspan.worker.engine.steps.runner import Runner
from allspan.worker.engine.steps.stage_runner import StageRunner
from allspan.worker.engine.steps.step_times import step_times
from allspan.worker.load.attention_ranks import attention_place
from allspan.worker.parallel.base import Collectives, PlanChannel, all_ranks
from allspan.worker.sampling.grammar_cache import Grammars
from allspan.worker.sampling.grammar_masks import MaskMaker
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.scheduler.counters import Load
from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts, DraftRunPlanner
from allspan.worker.scheduler.drafting.drafting import Drafting
from allspan.worker.scheduler.drafting.rank_drafts import RankDrafts
from allspan.worker.scheduler.drafting.table import drafters_of
from allspan.worker.scheduler.limits import GroupLimits, limits_of
from allspan.worker.scheduler.lookahead import BATCHES_A_STAGE, DEPTH, Lookahead, PipelineLookahead
from allspan.worker.scheduler.page_manager import PrefixSettings
from allspan.worker.scheduler.plan import Operation, StepPlan
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.scheduler import Scheduler
from allspan.worker.step.backend import StepParts
from allspan.worker.step.buffer_sizes import batch_sizes
from allspan.worker.step.model import PageTiers, StepModel

IDLE_SECONDS = 0.5
"""An idle loop wakes after this long, to count progress."""


class EngineCore:
    """Submit and cancel from any thread; `run()` (or `step()`, in tests) from one.

    `on_outputs` is called by that thread on the leader, once a step, with new tokens and ends of requests: each
    accepted request ends exactly once, also when the loop fails or is shut down. It must not wait for the core.
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: StepModel,
        num_pages: int | tuple[GroupLimits, ...],
        collectives: Collectives,
        parts: StepParts,
        channel: PlanChannel | None = None,
        eos_token_ids: tuple[int, ...] = (),
        tiers: PageTiers | None = None,
    ) -> None:
        """`num_pages`, of one cache group or of each, must be the same on every rank. `parts` come from the device's
        backend. `channel` may be None in a world of one rank. `tiers` None: no host tier."""
        if channel is None and all_ranks(collectives).size > 1:
            raise InternalError(f"a world of {all_ranks(collectives).size} ranks needs a plan channel")
        most, epoch = config.scheduler, config.service.epoch
        world, pipe = all_ranks(collectives), collectives.capabilities.pipe
        self.is_leader = world.rank == 0
        """True on the rank that schedules."""
        own = attention_place(config.model, collectives)
        vocab_size, length, row_inputs = sum(model.vocab_widths), model.max_model_len, model.row_inputs
        self.limits = limits_of(config, vocab_size, length, num_pages, row_inputs, own[1])
        self.on_outputs: OnOutputs = lambda outcomes: None
        self.grammars = Grammars(config.model.path, self.limits.vocab_size, config.parallel.cpus)
        self.loop_progress = Progress()
        self._status = EngineStatus(world.rank)
        self._changed = threading.Condition()
        self.operations = Operations(self._changed, self._status)
        # The leader's queue is the limit that callers meet; the inbox also holds what runs and what was just withdrawn.
        self._inbox = Inbox(2 * (most.max_queued_requests + most.max_num_seqs))
        self.sampler = sampler = Sampler(
            most.max_num_seqs,
            model.vocab_widths,
            collectives,
            eos_token_ids,
            parts.sampling,
            MaskMaker(config.parallel.cpus),
        )
        groups = self.limits.groups()
        lifetimes, drafters = ([each.lifetime for each in groups if each.is_drafter is kind] for kind in (False, True))
        sizes = batch_sizes(config, length, lifetimes, row_inputs, own, drafters)
        self._batch = Batch(sizes, sampler, parts.inputs, tiers, parts.adapters)
        depth = DEPTH if most.async_scheduling and parts.inputs.runs_ahead else 1
        runner: Runner | StageRunner = Runner(model, sampler, self._batch, self.is_leader, parts.drafter)
        lookahead = Lookahead(depth, sampler.samples_ahead)
        if pipe is not None:
            runner = StageRunner(model, sampler, self._batch, pipe)
            lookahead = PipelineLookahead(config.parallel.pipeline_batches or BATCHES_A_STAGE * pipe.num_stages)
        self._loop = StepLoop(runner, self._inbox, self._operate, channel, epoch, lookahead.depth)
        prefix = PrefixSettings(
            config.cache.enable_prefix_caching, config.model.name, tiers.num_host_pages if tiers else 0
        )
        scheduler = Scheduler(self.limits, eos_token_ids, epoch, prefix, lookahead=lookahead)
        self._planner = LeaderPlanner(
            scheduler, self._inbox, self.operations, self._status, self._changed, lambda ended: self.on_outputs(ended)
        )
        self.adapters = LiveAdapters(
            parts.adapters, scheduler.adapters, self.operations, self.operate, self._changed, config
        )
        self._refused = 0

    def submit(self, request: Request) -> None:
        """Leader: queues a request. Follower: keeps its payload until a plan joins it. A grammar that does not come
        with its request is compiled first: whatever waits here, no step does. Raises InvalidRequest, QueueFull,
        AlreadyExists, or Unavailable when the model is stopped or the loop has ended."""
        if not self.is_leader:
            self._loop.expect()
        request.digest()  # here, and not in the step that it joins
        if (grammar := request.params.grammar) is not None and request.grammar is None:
            request.grammar = self.grammars.compiled(grammar)
        with self._changed:
            if cause := self.refusal:
                raise Unavailable(cause)
            if not self.is_leader:
                self.limits.admit(request)
            try:
                self._inbox.put(request)
                if self.is_leader:
                    self._planner.submit(request)
            except QueueFull:
                self._refused += 1
                raise

    def cancel(self, request_ids: Iterable[bytes]) -> None:
        """Leader: ends requests in whatever state they are. Follower: gives back payloads that no plan has joined.
        Idempotent; unknown ids are passed over."""
        request_ids = tuple(request_ids)
        if self.is_leader:
            self._planner.cancel(request_ids)
        else:
            self._inbox.withdraw(request_ids)

    def start_model(self) -> None:
        """Lets new requests in again. Raises Unavailable while the weights are unloaded, or about to be, and once the
        loop has ended."""
        with self._changed:
            self._status.check_alive()
            if not self.operations.weights_loaded:
                raise Unavailable("the weights are unloaded; reload them first (reload_weights)")
            if self.operations.changes_weights:
                raise Unavailable("the weights are being unloaded or reloaded; start the model after that")
            self._status.move(EngineState.RUNNING)

    def stop_model(self, timeout: float, why: str = "the model is stopped; start it with start_model") -> None:
        """Refuses new requests (with the cause `why`) and waits for those that are open; DeadlineExceeded after
        `timeout` s."""
        with self._changed:
            if not self._status.is_ending:
                self._status.move(EngineState.STOPPED, why)
            self._planner.drain(timeout)

    def operate(self, operation: Operation, timeout: float, argument: bytes = b"") -> None:
        """Leader: has all ranks do something at the same step, and waits for its end; raises as `Operations.request`.
        InvalidRequest on a follower."""
        self._check_leader()
        self.operations.request(operation, timeout, self._planner.is_drained, argument)

    def rebalance_experts(self, timeout: float) -> None:
        """Leader: has ranks exchange experts so that all have about the same load, while steps go on. InvalidRequest on
        a follower; raises as `ExpertMoves.rebalance`."""
        self._check_leader()
        self.operations.rebalance(timeout)

    def draft_with(
        self, asked: Speculation, seconds: Mapping[int, float] | None = None, drafter: DrafterFacts | None = None
    ) -> None:
        """Leader, before the first step: drafts tokens as is asked. `seconds` that steps of so many tokens take; None:
        everything that is proposed is run, whether it pays or not. `drafter`: what there is to know of the one in the
        ranks, if there is one. ConfigError for an unknown method."""
        size, most = self.limits.vocab_size, self.limits.max_num_batched_tokens
        costs = StepCosts(seconds, most) if seconds else None
        drafters, run_planner = drafters_of(asked), None
        from_ranks = next((each for each in drafters if isinstance(each, RankDrafts)), None)
        if from_ranks and drafter:
            run_planner = DraftRunPlanner(from_ranks, asked.num_speculative_tokens, most, drafter, costs)
        drafting = Drafting(asked, drafters, size, costs, run_planner=run_planner)
        self._planner.scheduler.drafting = drafting

    def time_steps(self, model: StepModel, collectives: Collectives) -> dict[int, float]:
        """All ranks at once, before the first step: see `step_times`."""
        trial, to_host = self._batch.trial, self.sampler.to_host
        return step_times(trial, model, model.max_model_len, collectives, self.limits, to_host)

    def reset_prefix_cache(self) -> None:
        """Leader: forgets every cached page; those in use are forgotten when they are given back. InvalidRequest on a
        follower."""
        self._check_leader()
        self._planner.reset_prefix_cache()

    def shutdown(self) -> None:
        """Leader: ends the loop of every rank; open requests fail with Unavailable. A follower ends with its leader."""
        with self._changed:
            self._status.close()
            self._changed.notify_all()

    @property
    def state(self) -> str:
        """ "running", "stopped" (lets nothing in) or "failed"."""
        return self._status.report

    @property
    def refusal(self) -> str:
        """Why nothing is let in, "" while it is. Takes no lock."""
        return self._status.cause

    @property
    def is_busy(self) -> bool:
        """A step is being executed, or work waits for one. Takes no lock: a loop that hangs may hold it."""
        return self._loop.is_executing or self._planner.has_work

    @property
    def steps(self) -> int:
        """Plans executed so far."""
        return self._loop.steps

    @property
    def progress(self) -> int:
        """Rounds of the loop so far; idle, it comes round every IDLE_SECONDS."""
        return self.loop_progress.rounds

    @property
    def advance(self) -> int:
        """`progress`, and what the step under way has come to: busy, the loop hangs where this stands."""
        return self.loop_progress.total

    @property
    def progress_age_s(self) -> float:
        """Seconds since the loop last came round."""
        return self.loop_progress.age_s

    @property
    def page_log(self) -> PageLog | None:
        """What the prefix cache holds; None on a follower, and where nothing is kept."""
        return self._planner.scheduler.memory.log if self.is_leader else None

    def load(self) -> Load:
        """The leader's requests, tokens and pages. Takes no lock."""
        return self._planner.load()

    def statistics(self) -> EngineCounters:
        """Takes no lock that a step holds for long."""
        own: dict[str, Any] = {
            "page_size": self.limits.page_size,
            "refused_requests": self._refused,
            "steps": self._loop.steps,
            "host_s": max(self._loop.host_s, 0.0),
            "model_s": self._loop.runner.model_s,
            "weights_version": self.operations.weights_version,
            "weights_loaded": self.operations.weights_loaded,
        }
        if not self.is_leader:
            return EngineCounters(**(own | {"running": self._batch.num_rows}))
        return EngineCounters(**(self._planner.statistics() | own))

    def run(self) -> None:
        """Steps until `shutdown` (a follower: until the leader's). Raises what broke the loop."""
        try:
            while not self._status.has_ended:
                if not self.step() and self.is_leader:
                    self._planner.wait_for_work(IDLE_SECONDS, self._loop.steps)
                self.loop_progress.beat()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def step(self) -> bool:
        """One round of the loop; False when there was nothing to do."""
        return self._loop.lead(self._planner) if self.is_leader else self._loop.follow(IDLE_SECONDS)

    def check(self) -> None:
        """Raises InternalError unless the scheduler's invariants hold. For tests and idle moments."""
        self._planner.check()

    def _operate(self, plan: StepPlan) -> None:
        self.operations.carry_out(plan, self._planner.invalidate)

    def _check_leader(self) -> None:
        if not self.is_leader:
            raise InvalidRequest(f"this is rank {self._status.rank}, operations go to rank 0", "operation")

    def _end(self, failure: BaseException | None) -> None:
        """The loop is over: nothing more is let in, and every open request fails."""
        with self._changed:
            self._status.end(failure)
        self._planner.end()
