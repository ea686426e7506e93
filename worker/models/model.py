"""Model: one rank's part of a loaded model, ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.protos.api.engine import OpProfile
from allspan.protos.api.errors import InternalError
from allspan.protos.api.expert_load import ExpertLoad
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.models.blocks.moe import EXPERT_LOAD, EXPERT_PLACES
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import embedding_of, head_of
from allspan.worker.models.passes import Passes
from allspan.worker.models.pieces import EP
from allspan.worker.models.placement import Placement
from allspan.worker.models.spec import ModelSpec
from allspan.worker.parallel.base import Collectives
from allspan.worker.quant.base import LinearDelta
from allspan.worker.step.backend import Backend
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.step.inputs import StepInputs, StepMetadata
from allspan.worker.step.model import Record
from allspan.worker.step.row_inputs import RowInputs


class Model:
    """One rank's weights and its program: `bind_cache` first, then `forward` for every step."""

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
        self.holding = holding
        self.weights = dict(tensors)
        """The tensors of the weights, keyed by canonical name."""
        self.spec: ModelSpec = holding.spec
        self.max_model_len = limits.max_model_len
        self.cache_groups = cache_groups
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._passes = passes = Passes(holding, cache_groups, limits, ops, collectives, backend)
        self.vocab_widths = passes.vocab_widths
        """Columns of each rank's logits; a single number where every rank has all of them."""
        bindings, size, device = passes.bindings, self.spec.hidden_size, backend.capabilities.tensors
        self._constants = {name: make(limits.max_model_len).to(device) for name, make in bindings.constants.items()}
        self._derived = bindings.derived
        self._bind_weights()
        self.row_inputs = RowInputs(
            embedding_size=size,
            hidden_size=size,
            num_positions=bindings.num_positions,
            prompt_lengths=bindings.prompt_lengths(limits.max_model_len),
        )
        """Requests may bring embedding rows (what the model's embedding holds of token ids, or anything like it), and
        ask for hidden states; with a multimodal rotary embedding, bring positions; `add_adapters` has them take
        adapters."""
        self._has_cache = False

    def borrow(self, target: Model) -> None:
        """Uses what its target holds of the embedding and the head, where it has none of its own."""
        names = (embedding_of(target.spec).name, head_of(target.spec).name)
        held = {name: tensor for name, tensor in target.weights.items() if name.startswith(names)}
        self._passes.bind({name: tensor for name, tensor in held.items() if name not in self.weights})

    def add_adapters(self, delta: LinearDelta) -> None:
        """Has requests take adapters from now on. To be called once, before `bind_cache`."""
        if self._has_cache or self.row_inputs.num_adapters:
            raise InternalError("adapters are added once, before the cache is bound")
        self._passes.add(delta)
        self._passes.bind(delta.tensors)
        self._bind_weights()
        self.row_inputs = replace(self.row_inputs, num_adapters=delta.num_slots)

    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Has steps keep states of all their tokens from now on, for `features`: those before these layers; the number
        of layers stands for what the head reads. To be called once, before adapters are added and the cache is
        bound."""
        if self._has_cache or self.row_inputs.num_adapters:
            raise InternalError("features are kept before adapters are added and the cache is bound")
        self._passes.keep_features(layers)
        self._bind_weights()

    def _bind_weights(self) -> None:
        self._passes.bind(self.weights)
        self._passes.bind(self._constants)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Computes anew what is derived from `weights`; to be called when their tensors have been filled again."""
        tensors = self.weights | self._constants
        self._passes.bind({name: derive(tensors) for name, derive in self._derived.items()})

    @property
    def progress(self) -> int:
        """Counts up while a step runs; see `Interpreter.progress`."""
        return self._passes.progress

    @property
    def step_metadata(self) -> tuple[StepMetadata, ...]:
        """See `allspan.worker.step.model.DeviceModel`."""
        return self._passes.plain.steps.step_metadata

    def expert_loads(self) -> tuple[ExpertLoad, ...]:
        """The tokens that chose each expert since the model was loaded, by layer, of this rank's layers: a step that
        runs may be counted in part. May be called from any thread; on a GPU it waits for the steps that are queued."""
        counters = {
            int(name.removeprefix(f"{EXPERT_LOAD}.")): tensor
            for name, tensor in self._constants.items()
            if name.startswith(f"{EXPERT_LOAD}.")
        }
        if not counters:
            return ()
        tokens = torch.split(torch.cat(tuple(counters.values())).cpu(), [len(each) for each in counters.values()])
        found = {layer: tuple(each.tolist()) for layer, each in zip(counters, tokens, strict=True)}
        placement = self.holding.placement
        return tuple(ExpertLoad(layer, own, placement(layer, len(own)).tokens(own)) for layer, own in found.items())

    def forget_expert_loads(self) -> None:
        """`expert_loads` counts from now on. To be called while no step runs."""
        for name, tensor in self._constants.items():
            if name.startswith(f"{EXPERT_LOAD}."):
                tensor.zero_()

    def place_experts(self, layer: int, placement: Placement) -> None:
        """Routes tokens by another placement from the next step on; the weights must be there."""
        table = self._constants[f"{EXPERT_PLACES}.{layer}"]
        self.holding.placements[layer] = placement
        table.copy_(placement.table(self.holding.shard.groups[EP].rank, len(table)))

    def bind_cache(self, *caches: KVCache) -> None:
        """Uses these pages from now on, one cache for each of this model's `cache_groups`."""
        found, wanted = [kv.spec for kv in caches], [group.spec for group in self.cache_groups]
        if found != wanted:
            raise InternalError(f"a cache of {found} for a model of {wanted}")
        self._has_cache = True
        for group, kv in zip(self.cache_groups, caches, strict=True):
            for place, layer in enumerate(group.layers):
                self._passes.bind(
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
        return self._passes.run(inputs)

    def hidden_states(self, rows: Sequence[int]) -> Tensor:
        """See `allspan.worker.step.model.StepModel`."""
        newest = self._passes.newest
        held = newest.executor.rows(newest.decoder.hidden)
        chosen = held[rows.start : rows.stop] if isinstance(rows, range) else held[list(rows)]
        return chosen.to(torch.float32, copy=True)

    def features(self, num_tokens: int) -> Tensor:
        """What a draft head reads of the last step's tokens, float32 [n, states · hidden_size], in place: the next step
        overwrites it."""
        newest = self._passes.newest
        if newest.decoder.features is None:
            raise InternalError("features of a model that does not keep them")
        return newest.executor.rows(newest.decoder.features)[:num_tokens]

    def chained(self, num_rows: int) -> Tensor:
        """What the row of a draft head's own draft reads, for each of the last step's rows of logits, float32
        [m, hidden_size], in place."""
        newest = self._passes.newest
        if newest.decoder.chained is None:
            raise InternalError("states of drafts of a model that is no draft head")
        return newest.executor.rows(newest.decoder.chained)[:num_rows]

    def stream(self, inputs: StepInputs) -> Tensor:
        """See `allspan.worker.step.model.StepModel`."""
        own = self._passes.of(inputs)
        return own.executor.rows(own.decoder.residual)[: inputs.ids.shape[0]]

    def capture(self, inputs: StepInputs, record: Record) -> None:
        """Has the device record the forward pass of a padded step: later steps with their inputs in its place are one
        launch. Largest bucket first: all share its memory."""
        self._passes.capture(inputs, record)

    def run_beside(self, other: Model) -> None:
        """What is captured of this model from now on lies in the memory of what was captured of another one, whose
        steps never run at the same time."""
        self._passes.run_beside(other._passes)

    def forget_graphs(self) -> None:
        """Gives up what was captured, and its memory; steps are launched op by op until they are captured again."""
        self._passes.forget_graphs()

    @property
    def buffers(self) -> list[Tensor]:
        """See `allspan.worker.step.backend.Executor.buffers`."""
        return self._passes.buffers

    def start_profile(self) -> None:
        """Times every op of the coming steps, from zero; on a GPU it waits for each, which slows the step."""
        self._passes.start_profile()

    def stop_profile(self) -> None:
        """Stops timing; what was measured stays readable."""
        self._passes.stop_profile()

    def profile(self) -> tuple[OpProfile, ...]:
        """The time of each op on this rank since `start_profile`, the longest in total first; empty before any."""
        return self._passes.profile()
