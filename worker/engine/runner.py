"""Runner: a plan's tokens through the model and the sampler, and on a GPU the next step of rows that go on ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.backend.cuda.step_inputs import take_ids
from allspan.worker.engine.batch import Batch, LogitsRows, Longs
from allspan.worker.engine.inbox import Inbox
from allspan.worker.sampling.sampler import Launched, Sampled, Sampler
from allspan.worker.scheduler.lookahead import MayLaunch
from allspan.worker.scheduler.plan import Operation, StepPlan, StepResult
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.model import StepModel


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way on the GPU."""

    rows: Longs
    """Whose tokens it makes, in their order."""
    launched: Launched | None
    """None: nobody's."""


class Runner:
    """What a rank does with a plan.

    A plan may have the step after (`StepPlan.ahead`). Then that one is launched before the tokens of this one are known
    on the host: the GPU hands these over itself, and works while the host takes them in and schedules. The next plan
    with runs finds its step running; rows that have ended since are passed over. What such a row wrote lies past its
    tokens, in a page that nobody reads before it is written again, later on the same stream.
    """

    def __init__(self, model: StepModel, sampler: Sampler, batch: Batch, runs_ahead: bool) -> None:
        self.model_s = 0.0
        """Seconds in the model: of launching it, where it runs on its own, and of waiting for it."""
        self._model = model
        self._sampler = sampler
        self._batch = batch
        self._runs_ahead = runs_ahead
        self._flight: _Flight | None = None

    @property
    def may_launch(self) -> MayLaunch | None:
        """Who may join a step that runs ahead. None: there is none now, as the GPU cannot sample for all who are
        here."""
        return self._sampler.may_launch if self._runs_ahead and self._sampler.can_launch else None

    def run(self, plan: StepPlan, inbox: Inbox, operate: Callable[[Operation], None]) -> StepResult:
        """One plan: the state that it changes, its operation, its tokens."""
        flight, self._flight = self._flight, None
        inputs = self._batch.apply(plan, inbox, is_running=flight is not None)
        if plan.operation is not Operation.NONE:
            operate(plan.operation)
        wanted = self._batch.logits
        if not plan.runs:
            return self._batch.commit(None)
        if flight is None:
            if inputs is None:
                raise InternalError(f"step {plan.step} runs rows without inputs")
            self._sampler.prepare(wanted.rows, wanted.positions, wanted.targets)
            logits = self._forward(inputs)
            launches = plan.ahead or (self._runs_ahead and wanted.targets is None and self._sampler.can_launch)
            if len(wanted.rows) and not launches:
                return self._batch.commit(self._sampler.sample(logits, wanted.rows, wanted.positions, wanted.targets))
            flight = self._launch(logits, wanted)
        return self._land(plan, flight)

    def _land(self, plan: StepPlan, flight: _Flight) -> StepResult:
        """Sends the step after off, then waits for this one, if somebody samples in it."""
        if plan.ahead:
            ahead = self._batch.ahead(plan, flight.rows)
            if flight.launched is not None and ahead.num_unknown:
                take_ids(ahead.inputs, flight.launched.tokens, ahead.num_unknown)
            self._flight = self._launch(self._forward(ahead.inputs), ahead.logits)
        wanted = self._batch.logits
        if flight.launched is None or not len(wanted.rows):
            return self._batch.commit(None)
        before = time.perf_counter()
        sampled = flight.launched.result()
        self.model_s += time.perf_counter() - before
        return self._batch.commit(_of_rows(sampled, flight.rows, wanted.rows))

    def _launch(self, logits: Tensor, wanted: LogitsRows) -> _Flight:
        if not len(wanted.rows):
            return _Flight(wanted.rows, None)
        return _Flight(wanted.rows, self._sampler.launch(logits, wanted.rows, wanted.positions))

    def _forward(self, inputs: StepInputs) -> Tensor:
        before = time.perf_counter()
        logits = self._model.forward(inputs)
        self.model_s += time.perf_counter() - before
        return logits


def _of_rows(sampled: Sampled, made: Longs, wanted: Longs) -> Sampled:
    """Of what a step made for the rows `made`, that of the rows `wanted`."""
    if np.array_equal(made, wanted):
        return sampled
    at = {row: i for i, row in enumerate(made.tolist())}
    places = np.fromiter((at[row] for row in wanted.tolist()), dtype=np.int64, count=len(wanted))
    kept = set(wanted.tolist())
    logprobs = {row: entries for row, entries in sampled.logprobs.items() if row in kept}
    return Sampled(sampled.tokens[places], logprobs, sampled.prompt_logprobs)
