"""The parts that both OpenAI endpoints share: the envelope around choices, usage, and log-probabilities with tokens'
text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from allspan.client.gateway.admission.active_request import ActiveRequest, PromptLogprob
from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.context import GatewayContext
from allspan.protos.api.results import TokenLogprob
from allspan.protos.text import Tokenizer
from allspan.protos.text.stream.text_stream import TextDelta

Json = dict[str, Any]


@dataclass
class Gathered:
    """The collected output of one choice of an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    prompt_logprobs: Sequence[PromptLogprob] = ()
    """Complete once the first token is there."""

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens; minus infinity for no token."""
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


class Shape(Protocol):
    """The shape of one endpoint's answer."""

    id_prefix: str
    object: str
    chunk_object: str
    envelope: Json
    """The fields beside the choices, whole and in chunks."""

    def opening(self, index: int, generation: ActiveRequest) -> list[Json]:
        """Choices of the chunks that come before a stream's first token."""

    def pieces(self, index: int, delta: TextDelta) -> list[Json]:
        """Choices of the chunks for one delta; none when it holds nothing to tell."""

    def choice(self, index: int, gathered: Gathered) -> Json:
        """A whole choice."""

    def extras(self, gathered: Sequence[Gathered]) -> Json:
        """Returns the fields beside the choices of a whole answer."""

    def usage_details(self) -> Json:
        """Returns the fields that the choices so far add to the usage."""


@dataclass(frozen=True)
class Plan:
    """A checked request: its jobs in the order of their choices, and how to answer."""

    jobs: list[Job]
    shape: Shape
    choices: int
    """The number of choices for each prompt."""
    stream: bool
    include_usage: bool
    candidates: int = 0
    """The number of outputs for each prompt, when there are more than choices: the likeliest are taken, by their
    tokens' mean."""
    continuous_usage: bool = False
    """Whether every chunk carries the usage so far."""

    @property
    def jobs_per_prompt(self) -> int:
        return max(self.candidates, self.choices)

    def chosen(self, gathered: Sequence[Gathered]) -> list[int]:
        """Places in `gathered`, the best of each prompt's first."""
        places: list[int] = []
        for first in range(0, len(gathered), self.jobs_per_prompt):
            own = list(range(first, first + self.jobs_per_prompt))
            if self.candidates > self.choices:
                own.sort(key=lambda place: gathered[place].mean_logprob, reverse=True)
            places += own[: self.choices]
        return places


class Endpoint(Protocol):
    """A function that makes a plan from a request's body."""

    async def __call__(self, context: GatewayContext, body: bytes) -> Plan: ...


def usage(generations: Sequence[ActiveRequest], jobs_per_prompt: int) -> Json:
    """Counts over all that was generated; a prompt with several choices counts once."""
    firsts = generations[::jobs_per_prompt]
    prompt = sum(generation.num_prompt_tokens for generation in firsts)
    completion = sum(generation.num_output_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(generation.num_cached_tokens for generation in firsts)},
    }


class TokenTexts:
    """A single token as text and as bytes; bytes that are no whole character show as U+FFFD in the text.

    `as_ids`: the text is "token_id:7" instead, so that tokens with equal texts can be told apart.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def piece(self, token_id: int) -> bytes:
        return b"".join(self._tokenizer.pieces([token_id], skip_special_tokens=False))

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.piece(token_id).decode("utf-8", "replace")

    def of_prompt(self, prompt_logprobs: Sequence[PromptLogprob]) -> list[Json | None]:
        """vLLM's `prompt_logprobs`: a place a prompt token, null for the first, which nothing came before."""
        return [None, *(self._at(token_id, entry) for token_id, entry in prompt_logprobs)]

    def _at(self, token_id: int, entry: TokenLogprob) -> Json:
        """Returns entries by token id: the prompt's own and the likeliest. A rank is known among these only."""
        ranked = {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(entry.top, start=1)}
        found = {token_id: ranked.pop(token_id, (entry.logprob, None)), **ranked}
        return {
            str(each): {"logprob": logprob, "rank": rank, "decoded_token": self.piece(each).decode("utf-8", "replace")}
            for each, (logprob, rank) in found.items()
        }
