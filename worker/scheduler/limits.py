"""Limits: what the engine can hold, and the edge where a request that can never run is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.api.prompts import check_ids, check_length
from allspan.protos.config.settings import WorkerConfig
from allspan.worker.cache.budget import context_tokens, pages_of
from allspan.worker.cache.spec import ALL_TOKENS, PageLifetime
from allspan.worker.scheduler.request import Request
from allspan.worker.step.buffer_sizes import most_logits_rows
from allspan.worker.step.row_inputs import POSITION_AXES, RowInputs


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the scheduler knows of a cache group."""

    num_pages: int
    lifetime: PageLifetime = ALL_TOKENS
    num_host_pages: int = 0
    is_drafter: bool = False
    """They are of a model that drafts in the ranks, which has not always taken in all of a request's tokens."""
    is_head: bool = False
    """They are of a draft head, which takes in what the model computes, and writes keys of drafts behind that."""

    def most_pages(self, num_tokens: int, page_size: int, step_tokens: int) -> int:
        """See `PageLifetime.most_pages`."""
        return self.lifetime.most_pages(num_tokens, page_size, step_tokens)


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that scheduling depends on. Raises ConfigError for one that cannot be."""

    vocab_size: int
    max_model_len: int
    """Most tokens of a request, prompt and output."""
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    lifetime: PageLifetime = ALL_TOKENS
    """How long the first cache group, which has `num_pages`, keeps pages."""
    more_groups: tuple[GroupLimits, ...] = ()
    row_inputs: RowInputs = field(default_factory=RowInputs)
    attention_ranks: int = 1
    """Ranks that have so many pages each, for requests of their own; 1: every rank has the pages of all requests."""
    max_logits_rows: int = field(init=False)
    """Most rows of logits of a step: every running row's, or those of a chunk whose log-probabilities are asked."""
    max_chunk_tokens: int = field(init=False)
    """Most tokens of one request in a step: fewer than the step's where a window has no pages for more."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_logits_rows", most_logits_rows(self.max_num_seqs))
        object.__setattr__(self, "max_chunk_tokens", self.max_num_batched_tokens)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{each.name} is {value}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request may need a token in each step"
            )
        whole = pages_of(self.max_model_len, self.page_size)
        rooms = [
            (group.num_pages - 1) * self.page_size - group.lifetime.window + 1
            for group in self.groups()
            if group.lifetime.window and group.num_pages < whole
        ]
        object.__setattr__(self, "max_chunk_tokens", max(1, min([self.max_num_batched_tokens, *rooms])))

    def groups(self, num_host_pages: int = 0) -> tuple[GroupLimits, ...]:
        """All cache groups; `num_host_pages`: the first one's."""
        return (GroupLimits(self.num_pages, self.lifetime, num_host_pages), *self.more_groups)

    def context_tokens(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Returns for each cache group the tokens that so many pages of it hold; see `budget.context_tokens`."""
        size, step = self.page_size, self.max_num_batched_tokens
        context = [
            group.most_pages(self.max_model_len, size, group.lifetime.shortest_step(size, step))
            for group in self.groups()
        ]
        return context_tokens(pages, context, self.max_model_len, self.page_size)

    def admit(self, request: Request) -> None:
        """Sets `request.max_tokens`: what was asked for, cut to what the context leaves. Raises InvalidRequest, naming
        the first bad field, for a request that can never run."""
        ids = request.prompt_token_ids
        check_length(len(ids), self, "prompt_token_ids")
        check_ids(ids, self, "prompt_token_ids")
        request.params.check_vocabulary(self.vocab_size)
        self._check_positions(request)
        taken = max(len(ids), request.positions.following) if request.positions else len(ids)
        request.max_tokens = min(request.params.max_tokens, self.max_model_len - taken)
        self._check_resumed(request)
        self._check_row_inputs(request)
        # The last token is sampled, never computed: it takes no place in the cache.
        computed = len(ids) + (0 if request.options.pooling else request.max_tokens - 1)
        for group in self.groups():
            pages = group.most_pages(computed, self.page_size, self.max_chunk_tokens)
            if pages > group.num_pages:
                raise InvalidRequest(
                    f"prompt_token_ids ({len(ids)}) and max_tokens ({request.max_tokens}) need {pages} pages of "
                    f"{self.page_size} tokens, the whole cache has {group.num_pages}; at most "
                    f"{group.num_pages * self.page_size + 1} tokens fit",
                    "max_tokens",
                )

    def _check_row_inputs(self, request: Request) -> None:
        pooling = request.options.pooling
        if pooling and not self.row_inputs.hidden_size:
            raise InvalidRequest(f"pooling is {pooling!r}, the model gives no hidden states: leave it out", "pooling")
        if pooling and request.wants_prompt_logprobs:
            raise InvalidRequest(
                f"prompt_logprobs is given beside pooling {pooling!r}, which answers with a vector: leave one out",
                "prompt_logprobs",
            )
        scorer = self.row_inputs.scorer
        if pooling == "score" and not (scorer and scorer.num_labels):
            raise InvalidRequest(
                "pooling is 'score', the model has no head for scores: use last, mean or cls", "pooling"
            )
        if not pooling and scorer is not None and not scorer.generates:
            raise InvalidRequest("the model makes embeddings and generates no tokens: ask for embeddings", "pooling")
        if request.wants_hidden_state and not self.row_inputs.hidden_size:
            raise InvalidRequest("hidden_state is asked for, the model gives none: leave it out", "hidden_state")
        size, embeddings = self.row_inputs.embedding_size, request.embeddings
        if embeddings is None:
            return
        if embeddings.rows.ndim != 2 or embeddings.rows.shape[1] != size:
            raise InvalidRequest(
                f"embeddings has shape {embeddings.rows.shape}, must be [tokens, {size}]"
                + ("" if size else ": the model takes token ids only, leave it out"),
                "embeddings",
            )
        last, most = embeddings.first + len(embeddings.rows), len(request.prompt_token_ids)
        if embeddings.first < 0 or last > most:
            raise InvalidRequest(
                f"embeddings take the places {embeddings.first} to {last - 1}, must be within the prompt ({most} "
                "tokens)",
                "embeddings",
            )

    def _check_positions(self, request: Request) -> None:
        axes, positions = self.row_inputs.num_positions, request.positions
        if positions is None:
            return
        if axes == 1:
            raise InvalidRequest("positions are given, the model takes a token's index: leave them out", "positions")
        shape = axes, len(request.prompt_token_ids)
        if positions.rows.shape != shape:
            raise InvalidRequest(
                f"positions has shape {positions.rows.shape}, must be {shape}: one of each axis "
                f"({', '.join(POSITION_AXES)}) for each token of the prompt",
                "positions",
            )
        least, most = int(positions.rows.min()), self.max_model_len - 2
        if least < 0 or positions.following - 1 > most:
            raise InvalidRequest(
                f"positions reach from {least} to {positions.following - 1}, must be within 0 and max_model_len - 2 "
                f"({most}): the answer goes on from the largest",
                "positions",
            )

    def _check_resumed(self, request: Request) -> None:
        """The output tokens that a request comes with."""
        ids = request.output_token_ids
        if len(ids) >= request.max_tokens:
            raise InvalidRequest(
                f"output_token_ids has {len(ids)} tokens, must have fewer than the request may get "
                f"({request.max_tokens})",
                "output_token_ids",
            )
        check_ids(ids, self, "output_token_ids")


def limits_of(
    config: WorkerConfig,
    vocab_size: int,
    max_model_len: int,
    pages: int | tuple[GroupLimits, ...],
    row_inputs: RowInputs,
    attention_ranks: int = 1,
) -> Limits:
    """Returns the limits of a rank, from its model and its configuration. `pages`: of each cache group; a number stands
    for one group that keeps all tokens."""
    first, *more = (GroupLimits(pages),) if isinstance(pages, int) else pages
    most = config.scheduler
    return Limits(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        page_size=config.cache.page_size,
        num_pages=first.num_pages,
        lifetime=first.lifetime,
        more_groups=tuple(more),
        row_inputs=row_inputs,
        attention_ranks=attention_ranks,
        max_num_seqs=most.max_num_seqs,
        max_num_batched_tokens=most.max_num_batched_tokens,
        max_queued_requests=most.max_queued_requests,
    )
