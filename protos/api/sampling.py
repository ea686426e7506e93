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
    """Limits the new tokens; at least 1. The output also ends at the end of the context ("length"); the gateway refuses
    more than fit there."""
    temperature: float = param(1.0, Number(0.0, 100.0))
    """Sets the temperature, up to 100; 0, or less than 1e-5, always takes the most likely token."""
    top_k: int = param(0, Integer(-1, _MOST))
    """Keeps the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = param(1.0, Number(0.0, 1.0, instead="for greedy output use temperature 0"))
    """Keeps the smallest set of tokens whose probability reaches this, above 0 and at most 1; 1 keeps all."""
    min_p: float = param(0.0, Number(0.0, 1.0))
    """Drops the tokens that are less likely than this share of the most likely one; from 0 to 1."""
    seed: int | None = param(None, Integer(0, MAX_SEED, optional=True))
    """Seeds the draws, from 0 to 2**64-1; one is drawn if none is given. The same seed gives the same tokens, whatever
    else runs in the batch."""
    stop_token_ids: tuple[int, ...] = param((), TokenIds(MAX_STOP_TOKENS))
    """Ends the output when one of these tokens is sampled, in addition to the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = param((), Strings())
    """Ends the output when one of these appears in the text, which is cut before it. It needs a tokenizer."""
    ignore_eos: bool = param(False, Boolean())
    """Continues past the model's end-of-sequence tokens."""
    logprobs: int | None = param(None, Integer(0, MAX_LOGPROBS, optional=True, request_type=None))
    """Reports the log-probability of each chosen token and of this many of the most likely ones, 0 to 20; none if not
    given. They are those of the model's own logits, before penalties, masks, temperature and filters."""
    min_tokens: int = param(0, Integer(0, _MOST), masks=True)
    """Forbids the end before this many tokens: no end-of-sequence or stop token can be sampled, nor one that completes
    one of stop_words_ids."""

    prompt_logprobs: int | None = param(None, Integer(0, MAX_LOGPROBS, optional=True))
    """Reports the same of each prompt token after the first, with this many of the most likely ones, 0 to 20."""
    do_sample: bool = param(True, Boolean())
    """Draws the tokens; switched off, the most likely one is taken, whatever the temperature."""
    repetition_penalty: float = param(1.0, Number(0.0, 2.0, instead="1 is no penalty"))
    """Divides the positive logits of tokens that are in the prompt or the output by this, and multiplies the negative
    ones; above 0, at most 2."""
    suppress_repetition_in_generation: bool = param(False, Boolean())
    """Applies the repetition penalty to tokens of the output only."""
    presence_penalty: float = param(0.0, Number(-2.0, 2.0))
    """Subtracts this once from the logit of each token that is in the output; -2 to 2."""
    frequency_penalty: float = param(0.0, Number(-2.0, 2.0))
    """Subtracts this from a token's logit for each of its occurrences in the output; -2 to 2."""
    no_repeat_ngram_size: int = param(0, Integer(0, _MOST), masks=True)
    """Forbids the output to repeat this many tokens in a row of the prompt or the output; 0 allows it."""
    typical_p: float = param(1.0, Number(0.0, 1.0, instead="for greedy output use temperature 0"))
    """Keeps the tokens whose information is closest to the entropy until their probability reaches this, above 0 and at
    most 1; 1 keeps all."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = param((), TokenBiases(100.0))
    """Adds these values, -100 to 100, to the logits of token ids. Kept as sorted pairs."""
    allowed_token_ids: tuple[int, ...] = param((), TokenIds(MAX_ALLOWED_TOKENS), masks=True)
    """Allows only these tokens; empty allows all."""
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
