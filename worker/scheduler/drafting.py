"""Drafts (speculative decoding): tokens that a drafter proposes are run together with a request's last one, and those
that the sampler would have drawn are kept.

Replay verification: at every drafted position the sampler draws the token that it draws without drafts, by the same
(seed, position); the longest prefix of drafts that agrees is kept, and the first token that differs replaces its draft.
Whatever a drafter proposes, a request's tokens do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from allspan.protos.api.errors import ConfigError
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.scheduler.request import Request


class Drafter(Protocol):
    """Proposes what follows a request's tokens. Runs on the leader alone."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` token ids; more are cut off, and so is what follows an id that the model does not have."""


class PromptLookup:
    """Proposes what followed the last earlier occurrence of the request's last tokens (Saxena, Prompt Lookup Decoding,
    2023)."""

    def __init__(self, size: int = 3) -> None:
        """`size`: tokens that must occur again."""
        self._size = size

    def propose(self, request: Request, most: int) -> Sequence[int]:
        tokens, size = request.tokens(0, request.num_tokens), self._size
        last = tokens[-size:]
        for at in range(len(tokens) - size - 1, -1, -1):
            if tokens[at : at + size] == last:
                return tokens[at + size : at + size + most]
        return ()


DRAFTERS: dict[str, Callable[[], Drafter]] = {"prompt-lookup": PromptLookup}


def drafter_of(name: str) -> Drafter:
    """A new one. Raises ConfigError for a name that is not in DRAFTERS."""
    if name not in DRAFTERS:
        raise ConfigError(f"drafter is {name!r}, must be one of {', '.join(sorted(DRAFTERS))}")
    return DRAFTERS[name]()


@dataclass(frozen=True, slots=True)
class Drafting:
    """How drafts are made."""

    drafter: Drafter
    most: int
    """Drafts of a request in a step."""
    verifies: Callable[[SamplingParams], bool]
    """Whether the sampler can draw several tokens of a request that asks for this in one step."""

    def propose(self, request: Request, room: int, vocab_size: int) -> tuple[int, ...]:
        """Drafts for a request whose next step samples, as many as `room`, `most` and its `max_tokens` allow."""
        most = min(room, self.most, request.max_tokens - len(request.output_token_ids) - 1)
        if most <= 0 or not self.verifies(request.params):
            return ()
        drafts = tuple(self.drafter.propose(request, most))[:most]
        return next((drafts[:i] for i, token in enumerate(drafts) if not 0 <= token < vocab_size), drafts)
