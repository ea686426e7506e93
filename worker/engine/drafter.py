"""A drafter in the ranks: its model, or its head, is loaded, and given the buffers and pages of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from allspan.kernels.ops import OpSet
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import ModelConfig, WorkerConfig
from allspan.worker.backend.table import open_backend
from allspan.worker.cache.kv import KVCache
from allspan.worker.engine.steps.draft_head import DraftHead, HeadPlace
from allspan.worker.engine.steps.draft_model import DraftModel
from allspan.worker.engine.steps.draft_sampler import DraftSampler
from allspan.worker.engine.weights import Weights
from allspan.worker.load.draft_heads import PreparedDrafter, PreparedHead, load_head, prepare_head
from allspan.worker.load.loader import CheckpointWeights, load_model, prepare
from allspan.worker.models.model import Model
from allspan.worker.parallel.base import Collectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.step.backend import Backend, DeviceSteps
from allspan.worker.step.buffer_sizes import BatchSizes, ModelLimits, batch_sizes, most_logits_rows
from allspan.worker.step.inputs import InputBuffers

Await = Callable[[], None]


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a backend has made for the steps of a drafter."""

    backend: Backend
    sizes: BatchSizes
    sampling: Sampling

    @classmethod
    def of(cls, model: Model, config: WorkerConfig, backend: Backend, ops: OpSet, rank: int) -> DrafterParts:
        """For a model that drafts in an engine of this configuration."""
        lifetimes = tuple(group.lifetime for group in model.cache_groups)
        width = model.vocab_widths[rank % len(model.vocab_widths)]
        sampling = backend.sampling(config.scheduler.max_num_seqs, width, ops)
        return cls(backend, batch_sizes(config, model.max_model_len, lifetimes), sampling)

    def sampler(self, model: Model, collectives: Collectives, inputs: InputBuffers) -> DraftSampler:
        """Draws from the model's logits."""
        widths, ahead = model.vocab_widths, inputs.runs_ahead
        return DraftSampler(self.sizes.max_rows, widths, collectives, self.sampling, ahead)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A model that drafts, loaded on this rank."""

    config: ModelConfig
    model: Model
    parts: DrafterParts

    def warm_up(self) -> int:
        """See `allspan.worker.step.backend.Backend.warm_up`."""
        return self.parts.backend.warm_up(self.model, self.parts.sizes, self.parts.sampling)

    def open(self, pages: Sequence[KVCache], collectives: Collectives) -> DraftModel:
        """Binds its cache, of one entry for each of its groups; returns what drafts with it."""
        model, sizes = self.model, self.parts.sizes
        model.bind_cache(*pages)
        inputs = self.parts.backend.step_inputs(sizes, model)
        sampler = self.parts.sampler(model, collectives, inputs)
        return DraftModel(model, inputs, sizes.lifetimes, sizes.page_size, sampler)

    def weights(
        self, config: WorkerConfig, collectives: Collectives, await_others: Await, steps: DeviceSteps | None
    ) -> Weights:
        """Its weights as memory that can be given back; its pages are the engine's."""
        return Weights(self.model, self.config, config.cache, collectives, (), await_others, steps)


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A draft head, loaded on this rank."""

    prepared: PreparedHead
    model: Model
    target: Model
    parts: DrafterParts

    def warm_up(self) -> int:
        """See `allspan.worker.step.backend.Backend.warm_up`."""
        return self.parts.backend.warm_up(self.model, self.parts.sizes, self.parts.sampling)

    def open(self, pages: Sequence[KVCache], collectives: Collectives) -> DraftHead:
        """See `LoadedDrafter.open`."""
        model, sizes, backend = self.model, self.parts.sizes, self.parts.backend
        model.bind_cache(*pages)
        inputs = backend.step_inputs(sizes, model)
        place = HeadPlace(
            group=len(self.target.cache_groups),
            page_size=sizes.page_size,
            lifetime=sizes.lifetimes[0],
            num_features=len(self.prepared.spec.features) * self.target.spec.hidden_size,
            target_ids=self.prepared.target_ids,
            device=backend.capabilities.tensors,
        )
        return DraftHead(model, self.target, inputs, place, self.parts.sampler(model, collectives, inputs))

    def weights(
        self, config: WorkerConfig, collectives: Collectives, await_others: Await, steps: DeviceSteps | None
    ) -> Weights:
        """See `LoadedDrafter.weights`."""
        return _HeadWeights(self, config, collectives, await_others, steps)


class _HeadWeights(Weights):
    """The weights of a head, which is prepared beside its target."""

    def __init__(
        self,
        head: LoadedHead,
        config: WorkerConfig,
        collectives: Collectives,
        await_others: Await,
        steps: DeviceSteps | None,
    ) -> None:
        super().__init__(head.model, config.model, config.cache, collectives, (), await_others, steps)
        self._head, self._whole = head.prepared, config

    def _open(self) -> CheckpointWeights:
        ranks = self._collectives
        target = prepare(self._config, self._cache, ranks.rank, ranks.size)
        found = prepare_head(self._whole, target, self._head.spec)
        if found is None or not found.is_like(self._head):
            raise CheckpointError(
                "the head that drafts (speculative_config): another one lies here now; restart to draft with it, or "
                "put weights of the same shapes back"
            )
        named = replace(self._model.holding, weights=found.holding.weights)  # the same tensors may have other names now
        return CheckpointWeights(named, found.checkpoint)


def load_drafter(
    draft: PreparedDrafter | None,
    config: WorkerConfig,
    target: Model,
    ops: OpSet,
    collectives: Collectives,
    on_progress: Callable[[int, int], None] | None,
) -> LoadedDrafter | LoadedHead | None:
    """Reads this rank's weights of what drafts for `target`, if there is such a thing. Raises as `load_model` and
    `load_head`, and ConfigError for a model whose tokens have other positions than their numbers, and for a head that
    the model's kernels do not run."""
    if draft is None:
        return None
    most, backend = config.scheduler, open_backend(config.model.device, config.service.watchdog_timeout)
    tokens, logits = most.max_num_batched_tokens, most_logits_rows(most.max_num_seqs)
    own = backend.ops_beside(ops, lambda: draft.kernel_needs)
    if isinstance(draft, PreparedHead):
        if own is not ops:  # its steps would be laid out otherwise than the model's
            (head_dim, group), *_ = draft.kernel_needs.heads
            raise ConfigError(
                f"speculative_config: the head has a head size of {head_dim} and {group} query heads a KV head, which "
                f"the kernels of the model ({ops.name}) do not run: take another method"
            )
        limits = ModelLimits(tokens, logits, target.max_model_len, uses_cascades=False)
        model = load_head(draft, target, limits, own, collectives, backend)
    else:
        model = load_model(draft.config, collectives, own, tokens, logits, on_progress, config.cache)
        inputs = model.row_inputs
        if inputs.num_positions > 1 or inputs.prompt_lengths:
            raise ConfigError(
                f"speculative_config: model {draft.config.path} has rotary embeddings of several positions, or by the "
                "prompt's length: take another one"
            )
    model.run_beside(target)
    parts = DrafterParts.of(model, config, backend, ops, collectives.rank)
    if isinstance(draft, PreparedHead):
        return LoadedHead(draft, model, target, parts)
    return LoadedDrafter(draft.config, model, parts)
