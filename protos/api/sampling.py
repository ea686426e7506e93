"""Sampling parameters: the one table of what a request may ask of the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling_fields import (
    Boolean,
    Integer,
    Number,
    OptionalGrammar,
    Strings,
    TokenBiases,
    TokenIds,
    TokenIdSequences,
    fields_of,
    masks_of,
    param,
)

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
MAX_SEED = 2**64 - 1
MAX_ALLOWED_TOKENS = 65536
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request. Validated on construction; raises InvalidRequest naming the field.

    In this order: repetition penalty; presence and frequency penalties; logit_bias; the masks of no_repeat_ngram_size,
    bad_words_ids, allowed_token_ids, min_tokens and grammar; temperature; top_k; top_p; min_p; typical_p; the draw. A
    request for which all this leaves no token fails with InvalidRequest.
    """

    max_tokens: int = param(16, Integer(1, _MOST))
    """Most new tokens; at least 1. An engine stops at the context's end ("length"); the gateway refuses more."""
    temperature: float = param(1.0, Number(0.0, 100.0))
    """0 is greedy; up to 100. Below 1e-5 counts as 0."""
    top_k: int = param(0, Integer(-1, _MOST))
    """Keep the k most likely; 0 (or -1) keeps all."""
    top_p: float = param(1.0, Number(0.0, 1.0, instead="for greedy output use temperature 0"))
    """Keep the smallest set whose probability reaches this; in (0, 1]; 1 keeps all."""
    min_p: float = param(0.0, Number(0.0, 1.0))
    """Drop tokens less likely than this times the most likely; in [0, 1]."""
    seed: int | None = param(None, Integer(0, MAX_SEED, optional=True))
    """0 to 2**64-1; None draws one. The same seed gives the same tokens, whatever the batch."""
    stop_token_ids: tuple[int, ...] = param((), TokenIds(MAX_STOP_TOKENS))
    """Ends the output when one is sampled, beside the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = param((), Strings())
    """Ends the output when one appears in the text; the text is cut before it. Needs a tokenizer (facade side)."""
    ignore_eos: bool = param(False, Boolean())
    """Go on past the model's end-of-sequence ids."""
    logprobs: int | None = param(None, Integer(0, MAX_LOGPROBS, optional=True, request_type=None))
    """None: none. n in 0..20: the chosen token's log-probability and the n most likely tokens', all of them of the
    model's own logits, before penalties, masks, temperature and filters."""
    min_tokens: int = param(0, Integer(0, _MOST), masks=True)
    """Before this many tokens, end-of-sequence and stop ids cannot be sampled, nor what would complete one of
    stop_words_ids."""

    prompt_logprobs: int | None = param(None, Integer(0, MAX_LOGPROBS, optional=True))
    """None: none. n in 0..20: of each prompt token after the first, and of the n most likely there."""
    do_sample: bool = param(True, Boolean())
    """False is greedy, whatever the temperature."""
    repetition_penalty: float = param(1.0, Number(0.0, 2.0, instead="1 is no penalty"))
    """Logits of tokens seen in prompt and output are divided by it (if negative: multiplied); in (0, 2]."""
    suppress_repetition_in_generation: bool = param(False, Boolean())
    """The repetition penalty looks at the output only."""
    presence_penalty: float = param(0.0, Number(-2.0, 2.0))
    """Subtracted once from the logits of tokens in the output; -2 to 2."""
    frequency_penalty: float = param(0.0, Number(-2.0, 2.0))
    """Subtracted from a token's logit for each of its occurrences in the output; -2 to 2."""
    no_repeat_ngram_size: int = param(0, Integer(0, _MOST), masks=True)
    """The output completes no n tokens in a row that stand in prompt or output already; 0 allows it."""
    typical_p: float = param(1.0, Number(0.0, 1.0, instead="for greedy output use temperature 0"))
    """Keep the tokens closest to the expected surprise until their probability reaches this; in (0, 1]; 1 keeps all."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = param((), TokenBiases(100.0))
    """Added to the logits of these token ids; -100 to 100. Kept as sorted pairs."""
    allowed_token_ids: tuple[int, ...] = param((), TokenIds(MAX_ALLOWED_TOKENS), masks=True)
    """Only these can be sampled; empty: all."""
    bad_words_ids: tuple[tuple[int, ...], ...] = param((), TokenIdSequences(), masks=True)
    """Sequences of token ids that cannot be sampled: the last id is masked after the others."""
    stop_words_ids: tuple[tuple[int, ...], ...] = param((), TokenIdSequences())
    """Sequences of token ids that end the output when it ends with one; they stay in token_ids."""
    grammar: Grammar | None = param(None, OptionalGrammar(), masks=True)
    """The language of the output's text: only tokens that lead to a text of it can be sampled, and end-of-sequence
    only where it is whole."""

    def __post_init__(self) -> None:
        for name, (default, rule) in SAMPLING_FIELDS.items():
            if (value := getattr(self, name)) is not default:
                object.__setattr__(self, name, rule.check(name, value))
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, must be at most max_tokens ({self.max_tokens})", "min_tokens"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first token id that a model with so many tokens does not have."""
        for name, (_, rule) in SAMPLING_FIELDS.items():
            rule.check_vocabulary(name, getattr(self, name), vocab_size)

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


SAMPLING_FIELDS = fields_of(SamplingParams)
"""Default and rule of each field, by name."""
MASKING_FIELDS = masks_of(SamplingParams)
"""The fields that may forbid tokens."""
