"""A drafter in the ranks: its model is loaded, and given the buffers and pages of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allspan.kernels.ops import OpSet
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import ModelConfig, WorkerConfig
from allspan.worker.cache.kv import KVCache
from allspan.worker.engine.steps.draft_model import DraftModel
from allspan.worker.engine.weights import Weights
from allspan.worker.load.draft_model import PreparedDraft
from allspan.worker.load.loader import load_model
from allspan.worker.models.model import Model
from allspan.worker.parallel.base import Collectives
from allspan.worker.step.backend import Backend
from allspan.worker.step.buffer_sizes import batch_sizes, most_logits_rows


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


def load_drafter(
    draft: PreparedDraft | None,
    config: WorkerConfig,
    ops: OpSet,
    collectives: Collectives,
    on_progress: Callable[[int, int], None] | None,
) -> LoadedDrafter | None:
    """Reads this rank's weights of the model that drafts, if there is one. Raises as `load_model`, and ConfigError for
    a model whose tokens have other positions than their numbers."""
    if draft is None:
        return None
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
