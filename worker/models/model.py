"""Model: one rank's part of a loaded model, ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.table import activations_of
from allspan.protos.api.engine import OpProfile
from allspan.protos.api.errors import InternalError
from allspan.protos.api.expert_load import ExpertLoad
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.models.blocks.moe import EXPERT_LOAD, EXPERT_PLACES
from allspan.worker.models.decoder import Decoder, build_decoder
from allspan.worker.models.holding import Holding
from allspan.worker.models.pieces import EP
from allspan.worker.models.placement import Placement
from allspan.worker.models.shard import split
from allspan.worker.models.spec import ModelSpec
from allspan.worker.models.step_meta import MetaContext
from allspan.worker.models.step_runner import StepRunner
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.program import Rows, with_fused_routers, with_fused_sums, with_whole_logits
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
        self.vocab_widths = tuple(len(rows) for rows in split(self.spec.vocab_size, holding.shard.size))
        """Columns of each rank's logits; a single number where every rank has all of them."""
        decoder = build_decoder(holding, cache_groups[0].spec.is_quantised)
        activations = activations_of(ops, holding.dtype)
        program = decoder.program
        if activations in collectives.capabilities.fused_norms:
            program = with_fused_sums(program)
        if "norm_route" not in ops.reference_ops:
            program = with_fused_routers(program)
        is_last = holding.shard.stage.is_last
        if is_last and holding.shard.size > 1 and "all_gather_columns" in collectives.program_ops:
            program = with_whole_logits(program, self.vocab_widths)
            self.vocab_widths = (self.spec.vocab_size,)
        capacity = {Rows.TOKENS: limits.max_tokens, Rows.OWN: limits.max_tokens, Rows.LOGITS: limits.max_requests}
        self._executor = backend.executor(program, ops, collectives, capacity, activations)
        self._constants = _constants(decoder, limits.max_model_len, backend.capabilities.tensors)
        self._derived = decoder.bindings.derived
        self._executor.bind(tensors)
        self._executor.bind(self._constants)
        if holding.delta is not None:
            self._executor.bind(holding.delta.tensors)
        self.weights_changed()
        metas = {
            name: (group, make(MetaContext(backend, cache_groups[group].spec, limits, ops)))
            for name, (group, make) in decoder.bindings.metas.items()
        }
        num_positions, size = decoder.bindings.num_positions, self.spec.hidden_size
        lengths = decoder.bindings.prompt_lengths(limits.max_model_len)
        self.row_inputs = RowInputs(0, size, size, num_positions=num_positions, prompt_lengths=lengths)
        """Requests may bring embedding rows (what the model's embedding holds of token ids, or anything like it), and
        ask for hidden states; with a multimodal rotary embedding, bring positions."""
        device, row_numbers = backend.capabilities.tensors, None
        if num_positions > 1:
            row_numbers = torch.arange(limits.max_tokens, dtype=torch.int32, device=device)
        self._steps = StepRunner(self._executor, metas, len(cache_groups), collectives.check, row_numbers)
        self._hidden, self._residual = decoder.hidden, decoder.residual
        self._has_cache = False

    def weights_changed(self) -> None:
        """Computes anew what is derived from `weights`; to be called when their tensors have been filled again."""
        tensors = self.weights | self._constants
        self._executor.bind({name: derive(tensors) for name, derive in self._derived.items()})

    @property
    def progress(self) -> int:
        """Counts up while a step runs; see `Interpreter.progress`."""
        return self._executor.progress

    @property
    def step_metadata(self) -> tuple[StepMetadata, ...]:
        """See `allspan.worker.step.model.DeviceModel`."""
        return self._steps.step_metadata

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
        return self._steps.run(inputs)

    def hidden_states(self, rows: Sequence[int]) -> Tensor:
        """See `allspan.worker.step.model.StepModel`."""
        held = self._executor.rows(self._hidden)
        chosen = held[rows.start : rows.stop] if isinstance(rows, range) else held[list(rows)]
        return chosen.to(torch.float32, copy=True)

    def stream(self, num_tokens: int) -> Tensor:
        """See `allspan.worker.step.model.StepModel`."""
        return self._executor.rows(self._residual)[:num_tokens]

    def capture(self, inputs: StepInputs, record: Record) -> None:
        """Has the device record the forward pass of a padded step: later steps with their inputs in its place are one
        launch. Largest bucket first: all share its memory."""
        self._steps.capture(inputs, record)

    def forget_graphs(self) -> None:
        """Gives up what was captured, and its memory; steps are launched op by op until they are captured again."""
        self._steps.forget_graphs()

    @property
    def buffers(self) -> list[Tensor]:
        """See `allspan.worker.step.backend.Executor.buffers`."""
        return self._executor.buffers

    def start_profile(self) -> None:
        """Times every op of the coming steps, from zero; on a GPU it waits for each, which slows the step."""
        self._steps.start_profile()

    def stop_profile(self) -> None:
        """Stops timing; what was measured stays readable."""
        self._steps.stop_profile()

    def profile(self) -> tuple[OpProfile, ...]:
        """The time of each op on this rank since `start_profile`, the longest in total first; empty before any."""
        return self._steps.profile()


def _constants(decoder: Decoder, max_positions: int, device: str) -> dict[str, Tensor]:
    """The tensors that the program's blocks make of the number of positions alone, by their names."""
    return {name: make(max_positions).to(device) for name, make in decoder.bindings.constants.items()}
