"""Runner: a plan's tokens through the model and the sampler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.engine.batch.batch import Batch
from allspan.worker.engine.batch.batch_step import BatchStep
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.sampling.sampler import Launched, Sampler
from allspan.worker.scheduler.plan import Operation, StepPlan, StepResult
from allspan.worker.step.inputs import StepInputs, take_ids
from allspan.worker.step.model import StepModel
from allspan.worker.step.rank_drafter import RankDrafter

Operate = Callable[[StepPlan], None]
"""Carries out the operation of a plan."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way on a device."""

    plan: StepPlan
    step: BatchStep
    launched: Launched | None
    """None: it samples nothing."""
    hidden: Tensor | None
    """The hidden states that its rows ask for."""
    pooled: Tensor | None
    """The hidden states that rows with pooling are made of."""
    drafts: bool
    """The drafter has its turn when the step lands."""


class Runner:
    """What a rank does with a plan. `run` is the plain loop's: one step from its plan to its tokens. The overlapped
    loop has several in flight: `launch` begins a step, `land` waits for the oldest one.

    A row of a launched step may run a token that the step before is still sampling: the device hands it over itself.
    Rows that have ended when their step lands are passed over. What such a row wrote lies past its tokens, in a page
    that is not read before it is written again, later on the same CUDA stream.
    """

    def __init__(
        self,
        model: StepModel,
        sampler: Sampler,
        batch: Batch,
        is_leader: bool = True,
        drafter: RankDrafter | None = None,
    ) -> None:
        """Only the leader takes hidden states for rows with pooling: every rank has the same."""
        self._is_leader = is_leader
        self._drafter = drafter
        self.model_s = 0.0
        """Seconds in the model: of launching it, where it runs on its own, and of waiting for it."""
        self.wait_s = 0.0
        """Seconds of waiting for other stages: there are none."""
        self._model = model
        self._sampler = sampler
        self._batch = batch
        self._flights: deque[_Flight] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def lands_at_once(self) -> bool:
        """Whether all ranks sample the newest step in flight together, or draft behind it: no other one is launched
        before that is done."""
        newest = self._flights[-1]
        return newest.drafts or (newest.launched is not None and self._sampler.takes_all_ranks)

    def run(self, plan: StepPlan, inbox: Inbox, operate: Operate) -> StepResult:
        """One plan: the state that it changes, its operation, its tokens, and what is drafted behind these."""
        step = self._batch.apply(plan, inbox)
        if plan.operation is not Operation.NONE:
            operate(plan)
        result = self._verified(step)
        return self._drafted(plan, step, result) if self._drafts_behind(plan, step) else result

    def _verified(self, step: BatchStep) -> StepResult:
        """The step's tokens."""
        if step.inputs is None:
            return self._batch.commit(step, None)
        wanted = step.logits
        self._sampler.prepare(wanted.rows, wanted.positions, wanted.targets)
        logits = self._forward(step.inputs)
        pooled = self._pooled(step)
        if not len(wanted.rows):
            return self._batch.commit(step, None, None, self._on_host(pooled))
        hidden = self._hidden(step)
        logits = logits[: len(wanted.rows)] if step.pooled is not None else logits
        sampled = self._sampler.sample(logits, wanted.rows, wanted.positions, wanted.targets)
        return self._batch.commit(step, sampled, hidden, self._on_host(pooled))

    def launch(self, plan: StepPlan, inbox: Inbox, operate: Operate) -> None:
        """Begins a step behind those in flight."""
        newest = self._flights[-1] if self._flights else None
        step = self._batch.apply(plan, inbox, newest.step if newest else None)
        if plan.operation is not Operation.NONE:
            operate(plan)
        launched: Launched | None = None
        hidden: Tensor | None = None
        pooled: Tensor | None = None
        if step.inputs is not None:
            if step.num_unknown:
                if newest is None or newest.launched is None:
                    raise InternalError(f"step {plan.step} runs tokens that no step in flight samples")
                take_ids(step.inputs, newest.launched.tokens, step.num_unknown)
            wanted = step.logits
            self._sampler.prepare(wanted.rows, wanted.positions, wanted.targets)
            logits = self._forward(step.inputs)
            hidden, pooled = self._hidden(step), self._pooled(step)
            if len(wanted.rows):
                logits = logits[: len(wanted.rows)] if step.pooled is not None else logits
                launched = self._sampler.launch(logits, wanted.rows, wanted.positions, wanted.targets)
        drafts = self._drafts_behind(plan, step) and not self._follow(plan, step, launched)
        self._flights.append(_Flight(plan, step, launched, hidden, pooled, drafts))

    def land(self) -> StepResult:
        """Waits for the oldest step in flight, if it samples or pools, and drafts behind it, if that is asked for: then
        it is the only one. Raises DeadlineExceeded."""
        flight = self._flights.popleft()
        if flight.launched is None:
            return self._batch.commit(flight.step, None, None, self._on_host(flight.pooled))
        before = time.perf_counter()
        sampled = flight.launched.result()
        self.model_s += time.perf_counter() - before
        result = self._batch.commit(flight.step, sampled, flight.hidden, self._on_host(flight.pooled))
        return self._drafted(flight.plan, flight.step, result) if flight.drafts else result

    def _drafts_behind(self, plan: StepPlan, step: BatchStep) -> bool:
        """Whether the drafter has something to do behind a step."""
        return step.ran is not None and bool(plan.draft_runs or (self._drafter and self._drafter.follows))

    def _follow(self, plan: StepPlan, step: BatchStep, launched: Launched | None) -> bool:
        """Has the drafter take a step in while it goes on; returns False where its tokens must be known for that."""
        is_ahead = launched is None or (self._sampler.keeps_tokens and step.logits.targets is None)
        if plan.draft_runs or self._drafter is None or step.ran is None or not is_ahead:
            return False
        self._drafter.follow(self._batch.rows, step.ran, launched.tokens if launched else None)
        return True

    def _drafted(self, plan: StepPlan, step: BatchStep, result: StepResult) -> StepResult:
        """The result of a step, with what the drafter has made of the rows behind it."""
        if self._drafter is None or step.ran is None:
            raise InternalError(f"step {plan.step} has rows drafted for, this rank has no drafter")
        before = time.perf_counter()
        drafted = self._drafter.draft(plan.draft_runs, self._batch.rows, step.ran)
        seconds = time.perf_counter() - before
        self.model_s += seconds
        return replace(result, drafted=dict(drafted), draft_s=seconds)

    def _hidden(self, step: BatchStep) -> Tensor | None:
        """The hidden states that a step's rows ask for."""
        return self._model.hidden_states(tuple(step.hidden.values())) if step.hidden else None

    def _pooled(self, step: BatchStep) -> Tensor | None:
        """The hidden states that a step's rows with pooling are made of."""
        if step.pooled is None or not self._is_leader:
            return None
        return self._model.hidden_states(step.pooled.rows)

    def _on_host(self, pooled: Tensor | None) -> Tensor | None:
        """Waits for hidden states that are on their way. Raises DeadlineExceeded."""
        return None if pooled is None else self._sampler.to_host(pooled)

    def _forward(self, inputs: StepInputs) -> Tensor:
        before = time.perf_counter()
        logits = self._model.forward(inputs)
        self.model_s += time.perf_counter() - before
        return logits
