"""The sizes that the buffers of a model and of a step are made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allspan.protos.config.settings import WorkerConfig
from allspan.worker.cache.spec import ALL_TOKENS, PageLifetime
from allspan.worker.step.row_inputs import RowInputs, Scorer

NO_ROW_INPUTS = RowInputs()
LOGITS_ROWS = 64
"""A step may have this many rows of logits, however few requests run."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """For what the buffers are made: tokens and rows of logits of a step, and tokens of a request."""

    max_tokens: int
    max_requests: int
    max_model_len: int
    uses_cascades: bool = True
    """On a GPU: attention has room for states of tokens that several requests share."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The most that one step and one row may hold."""

    max_rows: int
    max_tokens: int
    """The most new tokens of a step."""
    max_model_len: int
    page_size: int
    max_logits_rows: int
    """The most rows of logits of a step."""
    lifetimes: tuple[PageLifetime, ...] = (ALL_TOKENS,)
    """How long each cache group keeps pages."""
    num_positions: int = 1
    """Positions of a token; see `RowInputs.num_positions`."""
    prompt_lengths: tuple[int, ...] = ()
    """See `RowInputs.prompt_lengths`."""
    scorer: Scorer | None = None
    """See `RowInputs.scorer`."""
    num_adapters: int = 0
    """See `RowInputs.num_adapters`."""
    attention_rank: int = 0
    """This rank among those that attend for requests of their own."""
    attention_ranks: int = 1
    """How many those are; 1: every rank attends for all requests."""
    drafter_lifetimes: tuple[PageLifetime, ...] = ()
    """How long the cache groups of a drafter in the ranks keep pages: they come behind the model's."""
    has_drafts: bool = False
    """Steps may have drafts."""
    captures: bool = True
    """Where a device can, steps are captured, and what they allocate is kept."""

    @property
    def most_decodes(self) -> int:
        """The most rows of a step of decodes alone, on a device that takes each draft as a row of its own."""
        return min(self.max_logits_rows, max(self.max_tokens, self.max_rows)) if self.has_drafts else self.max_rows


def most_logits_rows(max_num_seqs: int) -> int:
    """Returns the most rows of logits of a step of up to `max_num_seqs` requests."""
    return max(max_num_seqs, LOGITS_ROWS)


def batch_sizes(
    config: WorkerConfig,
    max_model_len: int,
    lifetimes: Sequence[PageLifetime] = (ALL_TOKENS,),
    row_inputs: RowInputs = NO_ROW_INPUTS,
    attention: tuple[int, int] = (0, 1),
    drafter_lifetimes: Sequence[PageLifetime] = (),
) -> BatchSizes:
    """Returns the sizes of a step of an engine with this configuration; `lifetimes` are those of the model's cache
    groups, `row_inputs` what its requests may bring, `attention` this rank among those that attend for requests of
    their own, and how many they are, `drafter_lifetimes` those of the cache groups of a drafter in the ranks."""
    most = config.scheduler
    rows, page_size = most_logits_rows(most.max_num_seqs), config.cache.page_size
    tokens = most.max_num_batched_tokens
    return BatchSizes(
        most.max_num_seqs,
        tokens,
        max_model_len,
        page_size,
        rows,
        tuple(lifetimes),
        row_inputs.num_positions,
        row_inputs.prompt_lengths,
        row_inputs.scorer,
        row_inputs.num_adapters,
        *attention,
        tuple(drafter_lifetimes),
        bool(most.speculative_config),
        not config.model.enforce_eager,
    )
