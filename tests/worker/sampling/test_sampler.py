"""A row gets what it asked for, whatever the batch, the number of ranks, and the steps in which it runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.kernels.abi.sampling import ALL_MASKED, NOT_FINITE
from allspan.protos.api.errors import InternalError, InvalidRequest
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.failure import failure
from allspan.worker.sampling.sampler import Sampler
from support.threads import ThreadWorld

V = 50
EOS = (3, 7)
NO_TOKENS = np.zeros(64, dtype=np.int32)


def sampler(max_rows=64, vocab=V):
    return Sampler(max_rows, (vocab,), LocalCollectives(), EOS)


def rows_of(*rows):
    return np.array(rows, dtype=np.int64)


def logits_for(seed, m=1, vocab=V):
    return torch.randn(m, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@st.composite
def row_params(draw):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 40, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.2])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 2, 5])),
        prompt_logprobs=draw(st.sampled_from([None, 0, 4])),
        min_tokens=draw(st.sampled_from([0, 8])),
        typical_p=draw(st.sampled_from([1.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        no_repeat_ngram_size=draw(st.sampled_from([0, 1])),
        logit_bias=draw(st.sampled_from([(), ((4, 3.0),)])),
        allowed_token_ids=draw(st.sampled_from([(), (1, 2, 3, 4)])),
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(row_params(), min_size=1, max_size=9), st.integers(0, 1000), st.integers(2, 4))
def test_a_row_samples_the_same_alone_in_a_batch_and_on_several_ranks(params, seed, size):
    m = len(params)
    targets = np.where(np.arange(m) % 4 == 2, 5, -1)
    rows, positions = np.arange(m) * 2, np.arange(m) * 3 + 5
    logits = logits_for(seed, m)

    def fill(one):
        for row, entry in zip(rows.tolist(), params, strict=True):
            one.add(row, entry, 4, NO_TOKENS)
        return one

    together = fill(sampler()).sample(logits.clone(), rows, positions, targets)
    for i in range(m):
        alone = fill(sampler()).sample(
            logits[i : i + 1].clone(), rows[i : i + 1], positions[i : i + 1], targets[i : i + 1]
        )
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs.get(int(rows[i])) == together.logprobs.get(int(rows[i]))
        assert alone.prompt_logprobs.get(int(rows[i])) == together.prompt_logprobs.get(int(rows[i]))

    world = ThreadWorld(size)
    widths = {2: (29, 21), 3: (20, 17, 13), 4: (20, 17, 8, 5)}[size]

    def on_rank(rank):
        one = fill(Sampler(64, widths, world.collectives[rank], EOS))
        first = sum(widths[:rank])
        return one.sample(logits[:, first : first + widths[rank]].contiguous(), rows, positions, targets)

    for result in world.run(on_rank):
        assert result.tokens.tolist() == together.tokens.tolist()
        assert result.logprobs == together.logprobs
        assert result.prompt_logprobs == together.prompt_logprobs


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(0, 1000), st.integers(2, 4), st.data())
def test_greedy_rows_get_the_token_of_one_rank_from_the_ranks_best_ones(m, seed, size, data):
    """Equals in different slices, rows without a finite number, slices without any."""
    widths = {2: (29, 21), 3: (20, 17, 13), 4: (20, 17, 8, 5)}[size]
    logits = torch.round(logits_for(seed, m))
    for row, column in data.draw(st.lists(st.tuples(st.integers(0, m - 1), st.integers(0, V - 1)), max_size=3)):
        logits[row, column] = data.draw(st.sampled_from([math.inf, math.nan, -math.inf]))
    for row, rank in data.draw(st.lists(st.tuples(st.integers(0, m - 1), st.integers(0, size - 1)), max_size=2)):
        first = sum(widths[:rank])
        logits[row, first : first + widths[rank]] = -math.inf
    if data.draw(st.booleans()):
        logits[0] = -math.inf
    rows, positions = np.arange(m), np.arange(m) + 5
    world = ThreadWorld(size)

    def tokens_of(one, part):
        for row in range(m):
            one.add(row, SamplingParams(temperature=0.0, seed=row), 4, NO_TOKENS)
        return one.sample(part, rows, positions).tokens.tolist()

    def on_rank(rank):
        first = sum(widths[:rank])
        part = logits[:, first : first + widths[rank]].contiguous()
        return tokens_of(Sampler(64, widths, world.collectives[rank], EOS), part)

    assert world.run(on_rank) == [tokens_of(sampler(), logits.clone())] * size


def test_logprobs_are_of_the_raw_logits_whatever_the_filters():
    logits = logits_for(6)
    log_softmax = torch.log_softmax(logits.double(), dim=1)[0]
    one = sampler()
    params = SamplingParams(
        temperature=0.3,
        top_k=2,
        min_p=0.2,
        seed=4,
        logprobs=5,
        min_tokens=3,
        repetition_penalty=1.9,
        logit_bias={9: 9.0},
    )
    one.add(0, params, 0, np.arange(64, dtype=np.int32))
    sampled = one.sample(logits.clone(), rows_of(0), rows_of(30))
    (entry,) = sampled.logprobs[0]
    assert entry.logprob == pytest.approx(float(log_softmax[sampled.tokens[0]]), abs=1e-5)
    best = torch.topk(log_softmax, 5)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_known_tokens_get_the_log_softmax_in_the_order_of_their_positions():
    logits = logits_for(6, 5)
    log_softmax = torch.log_softmax(logits.double(), dim=1)
    one = sampler()
    one.add(0, SamplingParams(prompt_logprobs=3, logprobs=0, seed=1), 5, NO_TOKENS)
    one.add(1, SamplingParams(temperature=0), 5, NO_TOKENS)
    targets = np.array([9, 0, 49, -1, -1])
    sampled = one.sample(logits.clone(), rows_of(0, 0, 0, 1, 0), rows_of(2, 3, 4, 9, 5), targets)
    assert sampled.tokens[:3].tolist() == [9, 0, 49]
    assert sampled.tokens[3] == logits[3].argmax()
    assert list(sampled.logprobs) == list(sampled.prompt_logprobs) == [0]
    for i, entry in enumerate(sampled.prompt_logprobs[0]):
        assert entry.logprob == pytest.approx(float(log_softmax[i, targets[i]]), abs=1e-5)
        best = torch.topk(log_softmax[i], 3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    one = sampler()
    for row, count in enumerate([None, 0, 3]):
        one.add(row, SamplingParams(temperature=0, logprobs=count), 0, NO_TOKENS)
    sampled = one.sample(logits_for(1, 3), rows_of(0, 1, 2), rows_of(0, 0, 0))
    assert {row: len(entry[0].top) for row, entry in sampled.logprobs.items()} == {1: 0, 2: 3}


def test_more_logprobs_than_the_vocabulary_has_are_all_of_it():
    one = sampler(vocab=3)
    one.add(0, SamplingParams(temperature=0, logprobs=20), 0, NO_TOKENS)
    (entry,) = one.sample(torch.tensor([[0.0, 1.0, 2.0]]), rows_of(0), rows_of(0)).logprobs[0]
    assert [token for token, _ in entry.top] == [2, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_is_sampled_before_min_tokens(temperature):
    logits = torch.zeros(1, V)
    logits[0, [3, 7, 20]] = 50.0
    one = sampler()
    one.add(0, SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=(20,), seed=1), 10, NO_TOKENS)
    ends = {*EOS, 20}
    tokens = [int(one.sample(logits.clone(), rows_of(0), rows_of(at)).tokens[0]) for at in (10, 11, 12)]
    assert [token in ends for token in tokens] == [False, False, True]


def test_min_tokens_with_ignored_eos_masks_the_stop_ids_alone():
    logits = torch.zeros(1, V)
    logits[0, 3], logits[0, 20] = 40.0, 50.0
    one = sampler()
    one.add(0, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(20,), ignore_eos=True), 0, NO_TOKENS)
    assert one.sample(logits, rows_of(0), rows_of(0)).tokens.tolist() == [3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 20])
def test_logits_that_are_not_finite_give_no_token(bad, temperature, logprobs):
    logits = logits_for(1, 2)
    logits[0, 5] = bad
    one = sampler()
    for row in range(2):
        one.add(row, SamplingParams(temperature=temperature, seed=1, logprobs=logprobs), 0, NO_TOKENS)
    tokens = one.sample(logits, rows_of(0, 1), rows_of(0, 0)).tokens
    assert tokens[0] == -1
    assert tokens[1] >= 0


def test_a_removed_row_leaves_nothing_for_the_next():
    one = sampler()
    one.add(
        0,
        SamplingParams(top_k=1, min_p=0.5, top_p=0.1, temperature=0.1, logprobs=3, min_tokens=9, seed=1),
        0,
        NO_TOKENS,
    )
    one.remove(0)
    fresh = sampler()
    for each in (one, fresh):
        each.add(0, SamplingParams(seed=5), 0, NO_TOKENS)
    for at in range(50):
        logits = logits_for(at)
        both = [each.sample(logits.clone(), rows_of(0), rows_of(at)) for each in (one, fresh)]
        assert both[0].tokens.tolist() == both[1].tokens.tolist()
        assert both[0].logprobs == {}


def test_another_seed_gives_other_tokens():
    logits, rows = logits_for(2).expand(20, -1), np.zeros(20, dtype=np.int64)
    runs = set()
    for seed in range(10):
        one = sampler()
        one.add(0, SamplingParams(seed=seed), 0, NO_TOKENS)
        runs.add(tuple(one.sample(logits.clone(), rows, np.arange(20)).tokens.tolist()))
    assert len(runs) == 10


PARAMS = SamplingParams(
    seed=3,
    temperature=2.0,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    no_repeat_ngram_size=2,
    bad_words_ids=((5, 6), (9,)),
    logit_bias={11: 2.0},
    min_tokens=9,
)


def generate(one, tokens, prompt_len, count):
    """`count` tokens, each from logits that its position alone decides; `tokens` is the row's buffer."""
    one.add(0, PARAMS, prompt_len, tokens)
    for at in range(prompt_len, prompt_len + count):
        tokens[at] = one.sample(logits_for(at), rows_of(0), rows_of(at)).tokens[0]
    return tokens[prompt_len : prompt_len + count].tolist()


def test_a_row_that_leaves_and_comes_back_goes_on_as_if_it_had_not():
    prompt = [1, 2, 3, 1, 2]
    buffer = np.array(prompt + [0] * 40, dtype=np.int32)
    whole = generate(sampler(), buffer, 5, 30)
    other = sampler()
    for leaves_at in (1, 13, 29):
        again = buffer.copy()
        again[5 + leaves_at :] = 0
        other.add(0, PARAMS, 5, again)
        for at in range(5 + leaves_at, 35):
            again[at] = other.sample(logits_for(at), rows_of(0), rows_of(at)).tokens[0]
        other.remove(0)
        assert again[5:35].tolist() == whole


def test_a_row_whose_steps_are_shared_by_ranks_samples_what_one_rank_would():
    prompt = [1, 2, 3, 1, 2]

    def buffer():
        return np.array(prompt + [0] * 40, dtype=np.int32)

    alone = generate(sampler(), buffer(), 5, 25)
    for size in (2, 4):
        world = ThreadWorld(size)

        def on_rank(rank, world=world, size=size):
            # Rank 0 has all columns: what is tested is who samples when. The row stands at another place each step.
            one = Sampler(64, (V,) + (0,) * (size - 1), world.collectives[rank], EOS)
            one.add(1, SamplingParams(temperature=0), 1, NO_TOKENS)
            tokens = buffer()
            one.add(0, PARAMS, 5, tokens)
            for at in range(5, 30):
                rows = np.array([1] * (at % size) + [0], dtype=np.int64)
                logits = torch.cat([logits_for(at), logits_for(at)]).repeat(size, 1)[: len(rows)]
                mine = logits if rank == 0 else logits[:, :0].contiguous()
                tokens[at] = one.sample(mine, rows, np.full(len(rows), at)).tokens[-1]
            return tokens[5:30].tolist()

        assert world.run(on_rank) == [alone] * size


def test_a_row_whose_tokens_are_all_masked_fails_alone_and_says_why():
    one = sampler()
    for row, params in enumerate(
        [
            SamplingParams(temperature=0, allowed_token_ids=(4,), bad_words_ids=((4,),), logprobs=3),
            SamplingParams(temperature=0, allowed_token_ids=EOS, min_tokens=1),
            SamplingParams(temperature=0),
        ]
    ):
        one.add(row, params, 2, NO_TOKENS)
    tokens = one.sample(logits_for(1, 3), rows_of(0, 1, 2), rows_of(2, 2, 2)).tokens
    assert tokens[:2].tolist() == [ALL_MASKED, ALL_MASKED]
    assert tokens[2] >= 0
    error = failure(int(tokens[0]), 2)
    assert isinstance(error, InvalidRequest)
    assert "position 2" in error.message


def test_logits_of_the_model_that_are_all_minus_infinity_are_the_models_fault():
    one = sampler()
    one.add(0, SamplingParams(temperature=0), 2, NO_TOKENS)
    one.add(1, SamplingParams(temperature=0, logit_bias={1: 5.0}), 2, NO_TOKENS)
    logits = torch.full((3, V), -math.inf)
    tokens = one.sample(logits, rows_of(0, 1, 0), rows_of(2, 2, 2), np.array([-1, -1, 7])).tokens
    assert tokens.tolist() == [NOT_FINITE] * 3
    assert isinstance(failure(NOT_FINITE, 2), InternalError)


def test_what_is_not_finite_is_seen_behind_a_mask():
    one = sampler()
    one.add(0, SamplingParams(temperature=0, allowed_token_ids=(4,)), 2, NO_TOKENS)
    logits = logits_for(1)
    logits[0, 9] = math.nan
    assert one.sample(logits, rows_of(0), rows_of(2)).tokens.tolist() == [NOT_FINITE]
