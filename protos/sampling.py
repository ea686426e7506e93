"""Sampling parameters: what a caller may ask of the sampler, checked once at the edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspan.protos.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Validated on construction; raises InvalidRequest naming the field."""

    max_tokens: int = 16
    """Most new tokens; at least 1. An engine stops at the context's end ("length"); the gateway refuses more."""
    temperature: float = 1.0
    """0 is greedy; up to 100. Below 1e-5 counts as 0."""
    top_k: int = 0
    """Keep the k most likely; 0 (or -1) keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches this; in (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely; in [0, 1]."""
    seed: int | None = None
    """0 to 2**64-1; None draws one. The same seed gives the same tokens, whatever the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the output when one is sampled, beside the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """Ends the output when one appears in the text; the text is cut before it. Needs a tokenizer (facade side)."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    logprobs: int | None = None
    """None: none. n in 0..20: the chosen token's log-probability and the n most likely tokens'."""
    min_tokens: int = 0
    """End-of-sequence and stop ids cannot be sampled before this many tokens."""

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0, must be in (0, 1]; for greedy output use temperature 0", "top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, must be at most max_tokens ({self.max_tokens})", "min_tokens"
            )
        object.__setattr__(self, "stop_token_ids", _integers("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop", _strings("stop", self.stop))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)


def _integer(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{field} is {value!r}, must be an integer", field)
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}, must be from {low} to {high}", field)


def _number(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{field} is {value!r}, must be a number", field)
    if not low <= value <= high:  # so NaN and infinities are refused too
        raise InvalidRequest(f"{field} is {value}, must be from {low:g} to {high:g}", field)


def _integers(field: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidRequest(f"{field} is {values!r}, must be a list of integers", field)
    if len(values) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"{field} has {len(values)} entries, at most {MAX_STOP_TOKENS}", field)
    for i, value in enumerate(values):
        _integer(f"{field}[{i}]", value, 0, 2**31 - 1)
    return tuple(values)


def _strings(field: str, values: Sequence[str]) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else values
    if not isinstance(values, Sequence):
        raise InvalidRequest(f"{field} is {values!r}, must be a list of strings", field)
    if len(values) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{field} has {len(values)} entries, at most {MAX_STOP_STRINGS}", field)
    for i, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{field}[{i}] is {value!r}, must be a non-empty string", field)
        if len(value) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(f"{field}[{i}] has {len(value)} characters, at most {MAX_STOP_STRING_CHARS}", field)
    return tuple(values)
