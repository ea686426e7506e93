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
from allspan.worker.step.backend import Backend
from allspan.worker.step.buffer_sizes import ModelLimits, batch_sizes, most_logits_rows


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A model that drafts, loaded on this rank."""

    config: ModelConfig
    model: Model

    def open(
        self, config: WorkerConfig, pages: Sequence[KVCache], backend: Backend, ops: OpSet, collectives: Collectives
    ) -> DraftModel:
        """Binds its cache, of one entry for each of its groups; returns what drafts with it in steps of an engine of
        this configuration."""
        model, most = self.model, config.scheduler
        model.bind_cache(*pages)
        lifetimes = tuple(group.lifetime for group in model.cache_groups)
        inputs = backend.step_inputs(batch_sizes(config, model.max_model_len, lifetimes), model)
        width = model.vocab_widths[collectives.rank % len(model.vocab_widths)]
        sampling = backend.sampling(most.max_num_seqs, width, ops)
        return DraftModel(model, inputs, lifetimes, config.cache.page_size, most.max_num_seqs, collectives, sampling)

    def weights(self, config: WorkerConfig, collectives: Collectives, await_others: Callable[[], None]) -> Weights:
        """Its weights as memory that can be given back; its pages are the engine's."""
        return Weights(self.model, self.config, config.cache, collectives, (), await_others)


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A draft head, loaded on this rank."""

    prepared: PreparedHead
    model: Model
    target: Model

    def open(
        self, config: WorkerConfig, pages: Sequence[KVCache], backend: Backend, ops: OpSet, collectives: Collectives
    ) -> DraftHead:
        """See `LoadedDrafter.open`."""
        model, most = self.model, config.scheduler
        model.bind_cache(*pages)
        (group,) = model.cache_groups
        inputs = backend.step_inputs(batch_sizes(config, model.max_model_len, (group.lifetime,)), model)
        width = model.vocab_widths[collectives.rank % len(model.vocab_widths)]
        sampling = backend.sampling(most.max_num_seqs, width, ops)
        place = HeadPlace(
            group=len(self.target.cache_groups),
            page_size=config.cache.page_size,
            lifetime=group.lifetime,
            num_features=len(self.prepared.spec.features) * self.target.spec.hidden_size,
            target_ids=self.prepared.target_ids,
        )
        sampler = DraftSampler(most.max_num_seqs, model.vocab_widths, collectives, sampling)
        return DraftHead(model, self.target, inputs, place, sampler)

    def weights(self, config: WorkerConfig, collectives: Collectives, await_others: Callable[[], None]) -> Weights:
        """See `LoadedDrafter.weights`."""
        return _HeadWeights(self, config, collectives, await_others)


class _HeadWeights(Weights):
    """The weights of a head, which is prepared beside its target."""

    def __init__(
        self, head: LoadedHead, config: WorkerConfig, collectives: Collectives, await_others: Callable[[], None]
    ) -> None:
        super().__init__(head.model, config.model, config.cache, collectives, (), await_others)
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
    `load_head`, and ConfigError for a model whose tokens have other positions than their numbers."""
    if draft is None:
        return None
    if isinstance(draft, PreparedHead):
        limits = ModelLimits(
            config.scheduler.max_num_batched_tokens,
            most_logits_rows(config.scheduler.max_num_seqs),
            target.max_model_len,
            uses_cascades=False,
        )
        backend = open_backend(config.model.device)
        return LoadedHead(draft, load_head(draft, target, limits, ops, collectives, backend), target)
    most = config.scheduler
    tokens, logits = most.max_num_batched_tokens, most_logits_rows(most.max_num_seqs)
    model = load_model(draft.config, collectives, ops, tokens, logits, on_progress, config.cache)
    inputs = model.row_inputs
    if inputs.num_positions > 1 or inputs.prompt_lengths:
        raise ConfigError(
            f"speculative_config: model {draft.config.path} has rotary embeddings of several positions, or by the "
            "prompt's length: take another one"
        )
    return LoadedDrafter(draft.config, model)
