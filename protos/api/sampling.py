"""Sampling parameters: what a caller may ask of the sampler, checked once at the edge."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_SEED = 2**64 - 1
MAX_ID_SEQUENCES = 1024
MAX_ID_SEQUENCE_LENGTH = 256
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Validated on construction; raises InvalidRequest naming the field.

    In this order: repetition penalty; presence and frequency penalties; logit_bias; the masks of no_repeat_ngram_size,
    bad_words_ids, allowed_token_ids, min_tokens and grammar; temperature; top_k; top_p; min_p; typical_p; the draw. A
    request for which all this leaves no token fails with InvalidRequest.
    """

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
    """None: none. n in 0..20: the chosen token's log-probability and the n most likely tokens', all of them of the
    model's own logits, before penalties, masks, temperature and filters."""
    min_tokens: int = 0
    """Before this many tokens, end-of-sequence and stop ids cannot be sampled, nor what would complete one of
    stop_words_ids."""

    prompt_logprobs: int | None = None
    """None: none. n in 0..20: of each prompt token after the first, and of the n most likely there."""
    do_sample: bool = True
    """False is greedy, whatever the temperature."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen in prompt and output are divided by it (if negative: multiplied); in (0, 2]."""
    suppress_repetition_in_generation: bool = False
    """The repetition penalty looks at the output only."""
    presence_penalty: float = 0.0
    """Taken once from the logits of tokens in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it stands in the output; -2 to 2."""
    no_repeat_ngram_size: int = 0
    """The output completes no n tokens in a row that stand in prompt or output already; 0 allows it."""
    typical_p: float = 1.0
    """Keep the tokens closest to the expected surprise until their probability reaches this; in (0, 1]; 1 keeps all."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of these token ids; -100 to 100. Kept as sorted pairs."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these can be sampled; empty: all."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that cannot be sampled: the last id is masked after the others."""
    stop_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that end the output when it ends with one; they stay in token_ids."""
    grammar: Grammar | None = None
    """The language of the output's text: only tokens that lead to a text of it can be sampled, and end-of-sequence
    only where it is whole."""

    def __post_init__(self) -> None:
        for field, low, high in INTEGER_RANGES:
            _integer(field, getattr(self, field), low, high)
        self._set("top_k", max(self.top_k, 0))
        for field, least, most in NUMBER_RANGES:
            self._set(field, _number(field, getattr(self, field), least, most))
        for field in ("ignore_eos", "do_sample", "suppress_repetition_in_generation"):
            _boolean(field, getattr(self, field))
        for field, most, way_out in _NEVER_ZERO:
            if getattr(self, field) == 0.0:
                raise InvalidRequest(f"{field} is 0, must be in (0, {most}]; {way_out}", field)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _integer(field, getattr(self, field), 0, MAX_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, must be at most max_tokens ({self.max_tokens})", "min_tokens"
            )
        self._set("stop_token_ids", _integers("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        self._set("stop", _strings("stop", self.stop))
        self._set("logit_bias", _biases("logit_bias", self.logit_bias))
        self._set("allowed_token_ids", _integers("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS))
        self._set("bad_words_ids", _sequences("bad_words_ids", self.bad_words_ids))
        self._set("stop_words_ids", _sequences("stop_words_ids", self.stop_words_ids))
        _grammar("grammar", self.grammar)

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first token id that a model with so many tokens does not have."""
        for field in ("stop_token_ids", "allowed_token_ids"):
            _below(field, getattr(self, field), vocab_size)
        for field in ("bad_words_ids", "stop_words_ids"):
            for i, ids in enumerate(getattr(self, field)):
                _below(f"{field}[{i}]", ids, vocab_size)
        for token_id, _ in self.biases:
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"logit_bias has token id {token_id}, must be from 0 to {vocab_size - 1}",
                    "logit_bias",
                )

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken (of equals, the lowest id)."""
        return not self.do_sample or self.temperature < 1e-5 or self.top_k == 1

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: pairs of token id and bias, sorted by id."""
        assert isinstance(self.logit_bias, tuple)  # made so on construction
        return self.logit_bias

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)


INTEGER_RANGES = (
    ("max_tokens", 1, 2**31 - 1),
    ("top_k", -1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("no_repeat_ngram_size", 0, 2**31 - 1),
)
NUMBER_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


_NEVER_ZERO = (
    ("top_p", 1, "for greedy output use temperature 0"),
    ("typical_p", 1, "for greedy output use temperature 0"),
    ("repetition_penalty", 2, "1 is no penalty"),
)


def _refusal(field: str, problem: str) -> InvalidRequest:
    """`field` may go on with an entry's place ("bad_words_ids[3][0]"): the error carries the field's own name."""
    return InvalidRequest(f"{field} {problem}", re.split(r"\W", field, maxsplit=1)[0])


def _shown(value: object) -> str:
    """For a message of one line: what a caller sent may be of any length."""
    return reprlib.repr(value)


def _boolean(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _refusal(field, f"is {_shown(value)}, must be true or false")


def _grammar(field: str, value: object) -> None:
    if value is not None and not isinstance(value, Grammar):
        raise _refusal(field, f"is {_shown(value)}, must be a Grammar")


def _integer(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refusal(field, f"is {_shown(value)}, must be an integer")
    if not low <= value <= high:
        raise _refusal(field, f"is {_shown(value)}, must be from {low} to {high}")


def _number(field: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refusal(field, f"is {_shown(value)}, must be a number")
    if not low <= value <= high:  # so NaN and infinities are refused too
        raise _refusal(field, f"is {_shown(value)}, must be from {low:g} to {high:g}")
    return float(value)


def _list(field: str, values: object, of: str, most: int) -> Sequence[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise _refusal(field, f"is {_shown(values)}, must be a list of {of}")
    if len(values) > most:
        raise _refusal(field, f"has {len(values)} entries, at most {most}")
    return values


def _integers(field: str, values: object, most: int) -> tuple[int, ...]:
    entries = _list(field, values, "integers", most)
    for i, value in enumerate(entries):
        _integer(f"{field}[{i}]", value, 0, 2**31 - 1)
    return tuple(entries)


def _sequences(field: str, values: object) -> tuple[tuple[int, ...], ...]:
    entries = _list(field, values, "lists of token ids", MAX_ID_SEQUENCES)
    sequences = tuple(_integers(f"{field}[{i}]", value, MAX_ID_SEQUENCE_LENGTH) for i, value in enumerate(entries))
    if () in sequences:
        raise _refusal(f"{field}[{sequences.index(())}]", "is empty, must have at least one token id")
    return sequences


def _biases(field: str, values: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = list(values.items() if isinstance(values, Mapping) else ((key, bias) for key, bias in values))  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise _refusal(field, f"is {_shown(values)}, must map token ids to numbers") from None
    if len(pairs) > MAX_LOGIT_BIASES:
        raise _refusal(field, f"has {len(pairs)} entries, at most {MAX_LOGIT_BIASES}")
    biases: dict[int, float] = {}
    for token_id, bias in pairs:
        _integer(f"{field} token id", token_id, 0, 2**31 - 1)
        if token_id in biases:
            raise _refusal(field, f"names token id {token_id} twice, must name each once")
        biases[token_id] = _number(f"{field}[{token_id}]", bias, -100.0, 100.0)
    return tuple(sorted(biases.items()))


def _below(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        i = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise _refusal(f"{field}[{i}]", f"is {ids[i]}, must be from 0 to {vocab_size - 1}")


def _strings(field: str, values: object) -> tuple[str, ...]:
    entries = (values,) if isinstance(values, str) else _list(field, values, "strings", MAX_STOP_STRINGS)
    for i, value in enumerate(entries):
        if not isinstance(value, str) or not value:
            raise _refusal(f"{field}[{i}]", f"is {_shown(value)}, must be a non-empty string")
        if len(value) > MAX_STOP_STRING_CHARS:
            raise _refusal(f"{field}[{i}]", f"has {len(value)} characters, at most {MAX_STOP_STRING_CHARS}")
    return tuple(entries)
