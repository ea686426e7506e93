"""What a request may ask of its logits before a token is drawn from them: one entry of CHANGES each, in this order:

    repetition penalty → presence and frequency penalties → logit_bias → no_repeat_ngram_size → bad_words_ids →
    allowed_token_ids → min_tokens → grammar

Then the kernel draws: temperature → top-k → top-p → min-p → typical-p → the token. Each filter sees what the one before
it has left. Greedy rows take the largest logit that the changes have left. Log-probabilities are those of the model's
own logits, before all of this. When every token is masked the request fails (`failure`): none that was excluded is ever
sampled.

An entry makes a row's change when the row joins, or None where the request does not ask; its state goes with the row.
A change reads the row's tokens up to the position that is sampled, so it does not matter which steps it has seen:
a rank sees its share of them only, and a preempted request begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.sampling.grammar import GrammarRow, ends_of
from allspan.worker.sampling.kernel import SamplingKernel
from allspan.worker.sampling.masks import AllowedTokens, MaskedSequences, MinTokens, NoRepeatNgram
from allspan.worker.sampling.penalties import PresenceAndFrequency, RepetitionPenalty, TokenCounts

Logits = NDArray[np.float32]
Change = Callable[[int, Logits], None]
"""Called with the position to be sampled and its logits [vocabulary], which it changes in place."""
Ban = NoRepeatNgram | MaskedSequences | MinTokens
"""A change that masks tokens: `ids(position)`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request as its changes see it."""

    params: SamplingParams
    prompt_len: int
    tokens: NDArray[np.int32]
    """Prompt and output; what lies before the position to be sampled is valid."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kernel: SamplingKernel
    grammar: GrammarRow | None = None

    def counts(self, start: int) -> TokenCounts:
        return TokenCounts(self.tokens, start, self.vocab_size)


def _repetition(row: Row) -> Change | None:
    params = row.params
    if params.repetition_penalty == 1.0:
        return None
    start = row.prompt_len if params.suppress_repetition_in_generation else 0
    return RepetitionPenalty(row.kernel, row.counts(start), params.repetition_penalty)


def _presence_and_frequency(row: Row) -> Change | None:
    params = row.params
    if params.presence_penalty == params.frequency_penalty == 0.0:
        return None
    counts = row.counts(row.prompt_len)
    return PresenceAndFrequency(row.kernel, counts, params.presence_penalty, params.frequency_penalty)


def _bias(row: Row) -> Change | None:
    if not row.params.biases:
        return None
    ids = np.array([token_id for token_id, _ in row.params.biases])
    values = np.array([bias for _, bias in row.params.biases], dtype=np.float32)

    def add(position: int, logits: Logits) -> None:
        logits[ids] += values

    return add


def _no_repeat_ngram(row: Row) -> Ban | None:
    size = row.params.no_repeat_ngram_size
    return NoRepeatNgram(row.tokens, size) if size else None


def _bad_words(row: Row) -> Ban | None:
    sequences = row.params.bad_words_ids
    return MaskedSequences(sequences, row.tokens) if sequences else None


def _allowed_tokens(row: Row) -> Change | None:
    ids = row.params.allowed_token_ids
    return AllowedTokens(ids) if ids else None


def _min_tokens(row: Row) -> Ban | None:
    params = row.params
    ends = ends_of(params, row.eos_token_ids, row.vocab_size)
    sequences = (*((end,) for end in sorted(ends)), *params.stop_words_ids)
    if not params.min_tokens or not sequences:
        return None
    masked = MaskedSequences(sequences, row.tokens, row.prompt_len)
    return MinTokens(masked, row.prompt_len + params.min_tokens)


CHANGES: tuple[Callable[[Row], Change | None], ...] = (
    _repetition,
    _presence_and_frequency,
    _bias,
    _no_repeat_ngram,
    _bad_words,
    _allowed_tokens,
    _min_tokens,
    lambda row: row.grammar,
)


def changes_of(row: Row) -> tuple[Change, ...]:
    """What the request asks for, in order; empty for most."""
    return tuple(change for make in CHANGES if (change := make(row)) is not None)


def bans_of(row: Row) -> tuple[Ban, ...]:
    """Those changes that mask what their tokens so far tell."""
    return tuple(ban for make in (_no_repeat_ngram, _bad_words, _min_tokens) if (ban := make(row)) is not None)


def needs_tokens(params: SamplingParams) -> bool:
    """Whether a mask depends on which tokens stand before the position, so that these must be known to make it."""
    sequences = (*params.bad_words_ids, *(params.stop_words_ids if params.min_tokens else ()))
    return params.grammar is not None or params.no_repeat_ngram_size > 0 or any(len(ids) > 1 for ids in sequences)
