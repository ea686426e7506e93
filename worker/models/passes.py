"""The forward passes of a model: that of any step, and where there are adapters one more of steps that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.table import activations_of
from allspan.protos.api.engine import OpProfile
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.models.decoder import Decoder, build_decoder
from allspan.worker.models.holding import Holding
from allspan.worker.models.shard import split
from allspan.worker.models.spec import HeadSpec
from allspan.worker.models.step_meta import MetaContext
from allspan.worker.models.step_runner import StepRunner
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.fused import (
    with_fused_adapters,
    with_fused_latents,
    with_fused_routers,
    with_fused_sums,
    with_settled_routings,
    with_whole_logits,
)
from allspan.worker.program.profile import summed
from allspan.worker.program.program import Program, Rows
from allspan.worker.quant.base import LinearDelta
from allspan.worker.step.backend import Backend, Executor
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.model import Record, Recording


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A program and what runs it."""

    decoder: Decoder
    executor: Executor
    steps: StepRunner


class Passes:
    """Chooses a step's pass: a step in which no token has an adapter costs what it would in a model without slots."""

    def __init__(
        self,
        holding: Holding,
        cache_groups: tuple[CacheGroup, ...],
        limits: ModelLimits,
        ops: OpSet,
        collectives: Collectives,
        backend: Backend,
    ) -> None:
        self._holding, self._ops, self._collectives = holding, ops, collectives
        self._is_quantised = cache_groups[0].spec.is_quantised
        self._activations = activations_of(ops, holding.dtype)
        shard, spec = holding.shard, holding.spec
        self._own_widths = tuple(len(rows) for rows in split(spec.vocab_size, shard.size))
        self._gathers = shard.stage.is_last and shard.size > 1 and "all_gather_columns" in collectives.program_ops
        self.vocab_widths = (spec.vocab_size,) if self._gathers else self._own_widths
        """Columns of each rank's logits; a single number where every rank has all of them."""
        decoder = build_decoder(holding, self._is_quantised)
        self.bindings = decoder.bindings
        """The same for all passes."""
        metas = {
            name: (group, make(MetaContext(backend, cache_groups[group].spec, limits, ops)))
            for name, (group, make) in self.bindings.metas.items()
        }
        row_numbers = None
        if self.bindings.num_positions > 1:
            row_numbers = torch.arange(limits.max_tokens, dtype=torch.int32, device=backend.capabilities.tensors)
        capacity = {Rows.TOKENS: limits.max_tokens, Rows.OWN: limits.max_tokens, Rows.LOGITS: limits.max_requests}

        def make(decoder: Decoder) -> ForwardPass:
            program = self._fused(decoder.program)
            executor = backend.executor(program, ops, collectives, capacity, self._activations)
            steps = StepRunner(executor, metas, len(cache_groups), collectives.check, row_numbers)
            return ForwardPass(decoder, executor, steps)

        self._make = make
        self._features: tuple[int, ...] = ()
        self._all = [make(decoder)]
        self._chained: ForwardPass | None = None
        """The pass of a draft head's steps behind its own drafts, where it is another one."""
        if isinstance(spec, HeadSpec) and spec.reads.tells_states_apart:
            self._chained = make(build_decoder(holding, self._is_quantised, is_chained=True))
            self._all.append(self._chained)
        self.newest = self.plain
        """The pass of the last step."""
        self._beside: Passes | None = None

    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Has the passes keep states of all tokens (`build_decoder`), of which none is bound to anything then."""
        self._features = layers
        self._all = [self._make(build_decoder(self._holding, self._is_quantised, layers))]
        self.newest = self.plain

    def add(self, delta: LinearDelta) -> None:
        """Adds the pass of steps in which a token has an adapter; nothing is bound to it yet."""
        adapted = replace(self._holding, delta=delta)
        self._all.append(self._make(build_decoder(adapted, self._is_quantised, self._features)))

    @property
    def plain(self) -> ForwardPass:
        return self._all[0]

    @property
    def progress(self) -> int:
        """Counts up while a step runs; see `Interpreter.progress`."""
        return sum(each.executor.progress for each in self._all)

    @property
    def buffers(self) -> list[Tensor]:
        """See `Executor.buffers`; and those of attention."""
        own = [buffer for each in self._all for buffer in each.executor.buffers]
        return own + [buffer for meta in self.plain.steps.step_metadata for buffer in meta.buffers]

    def bind(self, values: Mapping[str, Any]) -> None:
        """See `Executor.bind`."""
        for each in self._all:
            each.executor.bind(values)

    def run(self, inputs: StepInputs) -> Tensor:
        """See `StepRunner.run`."""
        self.newest = newest = self.of(inputs)
        if newest.decoder.given is not None and inputs.features is not None:
            newest.executor.rows(newest.decoder.given)[: len(inputs.features)].copy_(inputs.features)
        return newest.steps.run(inputs)

    def capture(self, inputs: StepInputs, record: Record) -> None:
        """See `StepRunner.capture`. What is recorded of any pass shares its memory with all others. Of decodes alone
        the pass of a head's own drafts is recorded, too."""
        passes = [self.of(inputs)]
        if self._chained is not None and inputs.decode_rows is None:
            passes.append(self._chained)
        for each in passes:
            others = (*self.recordings, *(self._beside.recordings if self._beside else ()))
            each.steps.capture(inputs, partial(_recorded, record, others))

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """What has been captured."""
        return tuple(recording for each in self._all for recording in each.steps.recordings)

    def run_beside(self, other: Passes) -> None:
        """See `Model.run_beside`."""
        self._beside = other

    def forget_graphs(self) -> None:
        """See `StepRunner.forget_graphs`."""
        for each in self._all:
            each.steps.forget_graphs()

    def of(self, inputs: StepInputs) -> ForwardPass:
        """Returns the pass that runs such a step."""
        if inputs.is_chained and self._chained is not None:
            return self._chained
        return self._all[-1] if inputs.adapters is not None else self.plain

    def start_profile(self) -> None:
        """Times every op of the coming steps, from zero."""
        for each in self._all:
            each.steps.start_profile()

    def stop_profile(self) -> None:
        """Stops timing; what was measured stays readable."""
        for each in self._all:
            each.steps.stop_profile()

    def profile(self) -> tuple[OpProfile, ...]:
        """The time of each op since `start_profile`, in all passes together, the longest in total first."""
        return summed(op for each in self._all for op in each.steps.profile())

    def _fused(self, program: Program) -> Program:
        """The program with ops that are several in one, as collectives and kernels have them."""
        if self._activations in self._collectives.capabilities.fused_norms:
            program = with_fused_sums(program)
        if "norm_route" not in self._ops.reference_ops:
            program = with_settled_routings(with_fused_routers(program))
        if "append_and_attend" not in self._ops.reference_ops:
            program = with_fused_latents(program)
        if "adapted_linear" not in self._ops.reference_ops:
            program = with_fused_adapters(program)
        return with_whole_logits(program, self._own_widths) if self._gathers else program


def _recorded(record: Record, others: Iterable[Recording], forward: Callable[[], Tensor]) -> Recording:
    return record(forward, others)
