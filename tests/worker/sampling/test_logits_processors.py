"""Each logits processor does what its definition says, transformers' own where there is one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.sampling.kernel import ReferenceKernel, SamplingKernel, sampling_kernel
from allspan.worker.sampling.logits_processors import processors_of
from allspan.worker.sampling.penalties import TokenCounts
from allspan.worker.sampling.processor import SamplingRow

V = 12
EOS = (3, 7)

texts = st.lists(st.integers(0, V - 1), min_size=1, max_size=30)
seeds = st.integers(0, 10_000)


def random_logits(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(V) * 3).astype(np.float32)


def row(
    params: SamplingParams, tokens: list[int], prompt_len: int = 0, kernel: SamplingKernel | None = None
) -> SamplingRow:
    buffer = np.zeros(64, dtype=np.int32)
    buffer[: len(tokens)] = tokens
    return SamplingRow(params, prompt_len, buffer, V, EOS, kernel or sampling_kernel())


def changed(logits: np.ndarray, tokens: list[int], prompt_len: int = 0, **params: Any) -> np.ndarray:
    """The logits of the token after `tokens`."""
    result = logits.copy()
    for processor in processors_of(row(SamplingParams(**params), tokens, prompt_len)):
        processor.apply(len(tokens), result)
    return result


def theirs(processor: Any, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    return processor(torch.tensor([tokens]), torch.tensor(logits[None]).clone())[0].numpy()


def test_a_request_that_asks_for_nothing_has_no_processors() -> None:
    plain = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.5, min_p=0.1, typical_p=0.5, logprobs=3, stop_token_ids=(1,)
    )
    assert processors_of(row(plain, [1, 2])) == ()


@given(texts, seeds, st.floats(0.1, 2.0))
def test_repetition_penalty(tokens: list[int], seed: int, penalty: float) -> None:
    logits = random_logits(seed)
    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), logits, tokens)
    assert changed(logits, tokens, repetition_penalty=penalty) == pytest.approx(expected, rel=1e-6)


@given(texts, st.integers(0, 30), seeds)
def test_a_suppressed_repetition_penalty_counts_output_only(tokens: list[int], prompt_len: int, seed: int) -> None:
    logits, prompt_len = random_logits(seed), min(prompt_len, len(tokens))
    output = tokens[prompt_len:]
    expected = theirs(RepetitionPenaltyLogitsProcessor(1.5), logits, output) if output else logits
    params = {"repetition_penalty": 1.5, "suppress_repetition_in_generation": True}
    assert changed(logits, tokens, prompt_len, **params) == pytest.approx(expected, rel=1e-6)


@given(texts, seeds, st.floats(0, 2, exclude_min=True), st.floats(-2, 2), st.floats(-2, 2))
def test_compiled_penalties_and_numpys_give_the_same_bits(
    tokens: list[int], seed: int, repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias={1: 1}
    )
    results = []
    for kernel in (sampling_kernel(), ReferenceKernel()):
        logits = random_logits(seed)
        for processor in processors_of(row(params, tokens, 1, kernel)):
            processor.apply(len(tokens), logits)
        results.append(logits.tolist())
    assert results[0] == results[1]


def test_a_penalty_near_zero_makes_no_infinity() -> None:
    logits = np.array([1.0, -1.0] * (V // 2), dtype=np.float32)
    result = changed(logits, [0, 1], repetition_penalty=5e-324)
    assert np.isfinite(result).all()
    assert result.argmax() == 0


@given(texts, st.integers(0, 30), seeds, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties_count_output_only(
    tokens: list[int], prompt_len: int, seed: int, presence: float, frequency: float
) -> None:
    logits, prompt_len = random_logits(seed), min(prompt_len, len(tokens))
    counts = np.bincount(tokens[prompt_len:], minlength=V)
    expected = logits - presence * (counts > 0) - frequency * counts
    result = changed(logits, tokens, prompt_len, presence_penalty=presence, frequency_penalty=frequency)
    assert result == pytest.approx(expected, abs=1e-4)


@given(texts, st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_counts_are_the_same_whichever_positions_they_were_asked_at(tokens: list[int], steps: list[int]) -> None:
    buffer = np.array(tokens, dtype=np.int32)
    counts = TokenCounts(buffer, 2, V)
    for position in np.cumsum(steps).clip(max=len(tokens)).tolist():
        ids, times = counts.until(position)
        expected = np.bincount(tokens[2:position], minlength=V)
        assert times.tolist() == expected.tolist()
        assert sorted(ids.tolist()) == np.flatnonzero(expected).tolist()


@settings(max_examples=200)
@given(texts, seeds, st.integers(1, 6))
def test_no_ngram_comes_twice(tokens: list[int], seed: int, size: int) -> None:
    logits = random_logits(seed)
    expected = theirs(NoRepeatNGramLogitsProcessor(size), logits, tokens)
    assert changed(logits, tokens, no_repeat_ngram_size=size).tolist() == expected.tolist()


def test_a_very_large_ngram_forbids_nothing() -> None:
    logits = random_logits(1)
    assert changed(logits, [1] * 30, no_repeat_ngram_size=2**31 - 1).tolist() == logits.tolist()


@settings(max_examples=200)
@given(
    texts, seeds, st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=9)
)
def test_bad_words_are_never_completed(tokens: list[int], seed: int, words: list[tuple[int, ...]]) -> None:
    logits = random_logits(seed)
    expected = theirs(NoBadWordsLogitsProcessor([list(word) for word in words]), logits, tokens)
    assert changed(logits, tokens, bad_words_ids=tuple(words)).tolist() == expected.tolist()


def test_biases_are_added() -> None:
    logits = random_logits(2)
    expected = logits.copy()
    expected[[4, 9]] += np.float32([2.5, -100.0])
    assert changed(logits, [1], logit_bias={9: -100, 4: 2.5}).tolist() == expected.tolist()


def test_only_allowed_tokens_keep_their_logits() -> None:
    logits = random_logits(3)
    result = changed(logits, [1], allowed_token_ids=(5, 2, 5))
    assert np.flatnonzero(np.isfinite(result)).tolist() == [2, 5]
    assert result[[2, 5]].tolist() == logits[[2, 5]].tolist()


@given(texts, st.integers(1, 30), st.integers(1, 6), seeds)
def test_no_end_before_min_tokens(tokens: list[int], prompt_len: int, min_tokens: int, seed: int) -> None:
    logits, prompt_len = random_logits(seed), min(prompt_len, len(tokens))
    processor = MinNewTokensLengthLogitsProcessor(prompt_len, min_tokens, list(EOS))
    expected = theirs(processor, logits, tokens)
    assert changed(logits, tokens, prompt_len, min_tokens=min_tokens).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("output", "masked"),
    [([], [6]), ([1], [2, 6]), ([1, 1], [2, 6]), ([1, 2], [6, 8]), ([2], [6]), ([1, 2, 1, 2], [6, 8]), ([0] * 5, [])],
)
def test_min_tokens_masks_what_would_complete_a_stop_sequence_of_the_output(
    output: list[int], masked: list[int]
) -> None:
    words = ((6,), (1, 2), (1, 2, 8))
    # The prompt ends with what begins one, which does not count.
    result = changed(random_logits(4), [1, *output], 1, stop_words_ids=words, ignore_eos=True, min_tokens=5)
    assert np.flatnonzero(np.isinf(result)).tolist() == masked


def test_ignored_ends_are_not_masked_but_stop_ids_are() -> None:
    params = {"min_tokens": 2, "stop_token_ids": (10,), "ignore_eos": True}
    assert np.flatnonzero(np.isinf(changed(random_logits(4), [1], 1, **params))).tolist() == [10]


def test_ends_beyond_the_vocabulary_are_passed_over() -> None:
    asked = SamplingRow(SamplingParams(min_tokens=1), 0, np.zeros(4, dtype=np.int32), V, (2, V + 5), sampling_kernel())
    (processor,) = processors_of(asked)
    logits = random_logits(5)
    processor.apply(0, logits)
    assert np.flatnonzero(np.isinf(logits)).tolist() == [2]


def test_penalties_come_before_biases_and_masks_last() -> None:
    logits = np.full(V, 4.0, dtype=np.float32)
    result = changed(
        logits,
        [9, 1, 1],
        1,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.25,
        logit_bias={1: 10.0, 3: 100.0, 2: 0.5},
        allowed_token_ids=(1, 2, 9, 3),
        bad_words_ids=((9,),),
        min_tokens=5,
    )
    finite = {token: float(result[token]) for token in np.flatnonzero(np.isfinite(result)).tolist()}
    assert finite == {1: 4.0 / 2 - 1 - 2 * 0.25 + 10, 2: 4.5}
    assert math.isinf(result[3])  # an end, however large its bias
