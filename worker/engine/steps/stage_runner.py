"""StageRunner: a plan's tokens through the layers of a pipeline's stage, and back what the last stage makes of them.

A step begins at the first stage and is passed on; when its last stage has sampled, all others are told. Meanwhile each
stage begins further steps, of other requests. All stages carry out the same plans in the same order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.engine.batch.batch import Batch
from allspan.worker.engine.batch.batch_step import BatchStep
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.engine.steps.runner import Operate
from allspan.worker.parallel.base import Pipe, Words
from allspan.worker.sampling.result import Sampled, Wanted, pack, unpack
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.scheduler.plan import Operation, StepPlan, StepResult
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.model import StepModel


@dataclass(frozen=True, slots=True)
class _Made:
    """What a step has made, as all stages know it."""

    sampled: Sampled | None
    hidden: Tensor | None
    pooled: Tensor | None


@dataclass(frozen=True, slots=True)
class _Flight:
    step: BatchStep
    wanted: Wanted
    made: _Made | None
    """None: the last stage will say."""


class StageRunner:
    """See `Runner`, which runs whole models. Steps in flight are of different requests, but for the chunks of one
    prompt."""

    lands_at_once = False
    """A step is sampled, by all ranks of the last stage, when it is launched."""

    def __init__(self, model: StepModel, sampler: Sampler, batch: Batch, pipe: Pipe) -> None:
        self.model_s = 0.0
        """Seconds in this stage's part of the model, and of handing on what it made."""
        self.wait_s = 0.0
        """Seconds of waiting for other stages."""
        self._model = model
        self._sampler = sampler
        self._batch = batch
        self._pipe = pipe
        self._is_last = pipe.stage == pipe.num_stages - 1
        self._flights: deque[_Flight] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def run(self, plan: StepPlan, inbox: Inbox, operate: Operate) -> StepResult:
        """One plan, from its state to its tokens."""
        self.launch(plan, inbox, operate)
        return self.land()

    def launch(self, plan: StepPlan, inbox: Inbox, operate: Operate) -> None:
        """This stage's part of a step."""
        step = self._batch.apply(plan, inbox)
        self._batch.part()
        if plan.operation is not Operation.NONE:
            operate(plan)
        if step.num_unknown:
            raise InternalError(f"step {plan.step} runs tokens that are not known")
        rows = step.logits
        wanted = self._sampler.wanted(rows.rows, rows.positions, rows.targets)
        made: _Made | None = None
        if step.inputs is None:
            made = _Made(None, None, None)
        else:
            if self._is_last:
                self._sampler.prepare(rows.rows, rows.positions, rows.targets)
            logits = self._forward(step.inputs)
            if not self._makes(step):
                made = _Made(None, None, None)
            elif self._is_last:
                made = self._make(step, logits)
                self._pipe.give(_words(made, wanted))
        self._flights.append(_Flight(step, wanted, made))

    def land(self) -> StepResult:
        """Waits for the oldest step in flight. Raises DeadlineExceeded."""
        flight = self._flights.popleft()
        made = flight.made if flight.made is not None else self._take(flight)
        return self._batch.commit(flight.step, made.sampled, made.hidden, made.pooled)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """What the stage makes of what it gets: logits in the last one."""
        before, pipe = time.perf_counter(), self._pipe
        stream = self._model.stream(inputs)
        if pipe.stage > 0:
            held = stream if stream.is_cpu else torch.empty_like(stream, device="cpu")
            pipe.receive(held)
            before = self._waited(before)
            if held is not stream:
                stream.copy_(held)
        logits = self._model.forward(inputs)
        if not self._is_last:
            pipe.send(stream if stream.is_cpu else self._sampler.to_host(stream))
        self.model_s += time.perf_counter() - before
        return logits

    def _waited(self, since: float) -> float:
        """Counts a wait for another stage; returns the time."""
        now = time.perf_counter()
        self.wait_s += now - since
        return now

    @staticmethod
    def _makes(step: BatchStep) -> bool:
        return bool(len(step.logits.rows)) or step.pooled is not None

    def _make(self, step: BatchStep, logits: Tensor) -> _Made:
        rows, sampled, hidden, pooled = step.logits, None, None, None
        if step.pooled is not None:
            pooled = self._sampler.to_host(self._model.hidden_states(step.pooled.rows))
        if step.hidden:
            hidden = self._sampler.to_host(self._model.hidden_states(tuple(step.hidden.values())))
        if len(rows.rows):
            logits = logits[: len(rows.rows)]
            sampled = self._sampler.sample(logits, rows.rows, rows.positions, rows.targets)
        return _Made(sampled, hidden, pooled)

    def _take(self, flight: _Flight) -> _Made:
        """What the last stage has made of a step."""
        step, wanted = flight.step, flight.wanted
        size = self._model.row_inputs.hidden_size
        tokens = (len(wanted.rows), wanted.columns if len(wanted.rows) else 0)
        counts = (len(step.hidden), len(step.pooled.rows) if step.pooled is not None else 0)
        before = time.perf_counter()
        words = self._pipe.take(tokens[0] * tokens[1] + sum(counts) * size)
        self._waited(before)
        table, states = words[: tokens[0] * tokens[1]], words[tokens[0] * tokens[1] :].view(np.float32)
        hidden, pooled = (
            torch.from_numpy(part.reshape(-1, size)) if size else None for part in np.split(states, [counts[0] * size])
        )
        return _Made(
            unpack(table.reshape(tokens), wanted) if tokens[0] else None,
            hidden if step.hidden else None,
            pooled if step.pooled is not None else None,
        )


def _words(made: _Made, wanted: Wanted) -> Words:
    parts = [np.zeros(0, dtype=np.int32)]
    if made.sampled is not None:
        parts.append(pack(made.sampled, wanted).reshape(-1))
    parts += [part.numpy().reshape(-1).view(np.int32) for part in (made.hidden, made.pooled) if part is not None]
    return np.concatenate(parts)
