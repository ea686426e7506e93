"""Model: one rank's part of a loaded model, ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.table import activations_of
from allspan.protos.api.engine import OpProfile
from allspan.protos.api.errors import InternalError
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheGroup, CacheSpec
from allspan.worker.models.decoder import build_decoder
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import only_group
from allspan.worker.models.shard import split
from allspan.worker.models.spec import ModelSpec
from allspan.worker.models.step_meta import MetaContext
from allspan.worker.models.sublayer import slots_name
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.program import Rows, with_fused_sums, with_whole_logits
from allspan.worker.step.backend import Backend
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.model import Record, Recording
from allspan.worker.step.row_inputs import RowInputs


class Model:
    """`bind_cache` first, then `forward` for every step."""

    def __init__(
        self,
        holding: Holding,
        tensors: Mapping[str, Tensor],
        cache_groups: tuple[CacheGroup, ...],
        limits: ModelLimits,
        ops: OpSet,
        collectives: Collectives,
        backend: Backend,
    ) -> None:
        shard = holding.shard
        self.holding = holding
        self.weights = dict(tensors)
        """By their canonical names."""
        self.spec: ModelSpec = holding.spec
        self.max_model_len = limits.max_model_len
        self.cache_groups = cache_groups
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.vocab_widths = tuple(len(rows) for rows in split(self.spec.vocab_size, shard.size))
        """Columns of each rank's logits; a single number where every rank has all of them."""
        capacity = {Rows.TOKENS: limits.max_tokens, Rows.LOGITS: limits.max_requests}
        decoder = build_decoder(holding, cache_groups[0].spec.is_quantised)
        program = decoder.program
        activations = activations_of(ops, holding.dtype)
        if activations in collectives.capabilities.fused_norms:
            program = with_fused_sums(program)
        self._check = collectives.check
        if shard.size > 1 and "all_gather_columns" in collectives.program_ops:
            program = with_whole_logits(program, self.vocab_widths)
            self.vocab_widths = (self.spec.vocab_size,)
        self._executor = backend.executor(program, ops, collectives, capacity, activations)
        self._executor.bind(tensors)
        device, made = backend.capabilities.tensors, decoder.bindings.constants.items()
        self._constants = {name: make(limits.max_model_len).to(device) for name, make in made}
        self._executor.bind(self._constants)
        self._derived = decoder.bindings.derived
        self.weights_changed()
        self._metas = {
            name: (group, make(MetaContext(backend, cache_groups[group].spec, limits, ops)))
            for name, (group, make) in decoder.bindings.metas.items()
        }
        _, self.step_metadata = next(iter(self._metas.values()))
        if holding.delta is not None:
            self._executor.bind(holding.delta.tensors)
        self._has_cache = False
        self._inputs: StepInputs | None = None
        self._is_profiling = False
        self._graphs: dict[tuple[int, bool, bool], Recording] = {}
        """By the place of their inputs."""
        self._step: tuple[dict[str, Any], int, int] = {}, 0, 0
        """What `_inputs` are to the program: by its names, tokens, rows of logits."""

    def weights_changed(self) -> None:
        """Computes anew what is derived from `weights`; to be called when their tensors have been filled again."""
        tensors = self.weights | self._constants
        self._executor.bind({name: derive(tensors) for name, derive in self._derived.items()})

    @property
    def progress(self) -> int:
        """Counts up while a step runs; see `Interpreter.progress`."""
        return self._executor.progress

    @property
    def cache_spec(self) -> CacheSpec:
        """That of the only cache group. ConfigError for a model of several, which the engine does not serve yet."""
        return only_group(self.cache_groups)

    @property
    def row_inputs(self) -> RowInputs:
        """Token ids are all that requests bring so far."""
        return RowInputs()

    def bind_cache(self, *caches: KVCache) -> None:
        """Uses these pages from now on, one cache for each of this model's `cache_groups`."""
        found, wanted = [kv.spec for kv in caches], [group.spec for group in self.cache_groups]
        if found != wanted:
            raise InternalError(f"a cache of {found} for a model of {wanted}")
        self._has_cache = True
        for group, kv in zip(self.cache_groups, caches, strict=True):
            for place, layer in enumerate(group.layers):
                self._executor.bind(
                    {
                        f"k_cache.{layer}": kv.keys[place],
                        f"v_cache.{layer}": kv.values[place],
                        f"k_scales.{layer}": kv.key_scales[place],
                        f"v_scales.{layer}": kv.value_scales[place],
                    }
                )

    def forward(self, inputs: StepInputs) -> Tensor:
        """This rank's logits, float32 [m, vocab_widths[rank]] (every rank's, of one width): a view of a buffer that the
        next step overwrites.

        Writes the keys and values of the n new tokens to their slots. Every rank must call it with the same inputs.
        Raises InternalError without a cache, or for more rows than the model was loaded for.
        """
        if not self._has_cache:
            raise InternalError("forward before bind_cache")
        self._check()
        if inputs.place in self._graphs and not self._is_profiling:
            return self._graphs[inputs.place].replay()[: inputs.num_rows]
        if inputs is not self._inputs:
            self._inputs = inputs
            self._step = self._by_name(inputs), inputs.ids.shape[0], inputs.logits_rows.shape[0]
        logits = self._executor.run(*self._step)
        return logits[: inputs.num_rows] if inputs.bucket else logits

    def capture(self, inputs: StepInputs, record: Record) -> None:
        """Has the device record the forward pass of a padded step: later steps with their inputs in its place are one
        launch. Largest bucket first: all share its memory."""
        step = self._by_name(inputs), inputs.ids.shape[0], inputs.logits_rows.shape[0]
        self._graphs[inputs.place] = record(lambda: self._executor.run(*step), self._graphs.values())

    def forget_graphs(self) -> None:
        """Gives up what was captured, and its memory; steps are launched op by op until they are captured again."""
        self._graphs.clear()

    @property
    def buffers(self) -> list[Tensor]:
        """See `allspan.worker.step.backend.Executor.buffers`."""
        return self._executor.buffers

    def _by_name(self, inputs: StepInputs) -> dict[str, Any]:
        groups = [inputs.of_group(group) for group in range(len(self.cache_groups))]
        return {
            "ids": inputs.ids,
            "positions": inputs.positions,
            "logits_rows": inputs.logits_rows,
            "adapters": inputs.adapters,
            **{slots_name(group): own.slots for group, own in enumerate(groups)},
            **{name: meta.of(groups[group]) for name, (group, meta) in self._metas.items()},
        }

    def start_profile(self) -> None:
        """Times every op of the coming steps, from zero; on a GPU it waits for each, which slows the step."""
        self._is_profiling = True
        self._executor.start_profile()

    def stop_profile(self) -> None:
        """What was measured stays readable."""
        self._is_profiling = False
        self._executor.stop_profile()

    def profile(self) -> tuple[OpProfile, ...]:
        """What each op took on this rank since `start_profile`, the longest in total first; empty before any."""
        return self._executor.profile()
