"""What is sampled follows the distribution that was asked for, whatever the batch and the number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.sampling import SamplingParams
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.sampling.sampler import draw as draw_index
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


def draw(logits, params, count):
    """`count` tokens for the same logits, at positions 0 … count - 1."""
    one = sampler(max_rows=1, vocab=logits.shape[1])
    one.add(0, params, 0, NO_TOKENS)
    rows = np.zeros(count, dtype=np.int64)
    return one.sample(logits.expand(count, -1).clone(), rows, np.arange(count)).tokens


def expected(logits, params):
    """The distribution by definition, in float64, token by token."""
    x = logits.double().numpy()[0] / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_k:
        p[p < np.sort(p)[-params.top_k]] = 0
        p /= p.sum()
    if params.top_p < 1:
        descending = np.sort(p)[::-1]
        more_likely = len(p) - np.searchsorted(np.sort(p), p, side="right")
        before = np.append(0, np.cumsum(descending))[more_likely]
        p[before >= params.top_p] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_pass_a_chi_square_test_against_the_softmax(case):
    params = SamplingParams(seed=11, **case)
    logits = logits_for(5)
    count = 6000
    probabilities = expected(logits, params)
    counts = np.bincount(draw(logits, params, count), minlength=V)
    assert counts[probabilities == 0].sum() == 0
    # Tokens expected fewer than five times are counted together.
    is_rare = probabilities * count < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(probabilities[~is_rare], probabilities[is_rare].sum()) * count
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    freedom = max(len(wanted) - 1, 1)
    # Wilson and Hilferty's approximation of the 99.99 % point.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


@st.composite
def row_params(draw):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 40, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.2])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 2, 5])),
        min_tokens=draw(st.sampled_from([0, 8])),
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(row_params(), min_size=1, max_size=9), st.integers(0, 1000))
def test_a_row_samples_the_same_alone_in_a_batch_and_on_several_ranks(params, seed):
    m = len(params)
    rows, positions = np.arange(m) * 2, np.arange(m) * 3 + 5
    logits = logits_for(seed, m)

    def fill(one):
        for row, entry in zip(rows.tolist(), params, strict=True):
            one.add(row, entry, 4, NO_TOKENS)
        return one

    together = fill(sampler()).sample(logits.clone(), rows, positions)
    for i in range(m):
        alone = fill(sampler()).sample(logits[i : i + 1].clone(), rows[i : i + 1], positions[i : i + 1])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs.get(int(rows[i])) == together.logprobs.get(int(rows[i]))

    world = ThreadWorld(3)
    widths = (20, 17, 13)

    def on_rank(rank):
        one = fill(Sampler(64, widths, world.collectives[rank], EOS))
        first = sum(widths[:rank])
        return one.sample(logits[:, first : first + widths[rank]].contiguous(), rows, positions)

    for result in world.run(on_rank):
        assert result.tokens.tolist() == together.tokens.tolist()
        assert result.logprobs == together.logprobs


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    logits = torch.zeros(2, V)
    logits[0, 17] = logits[0, 30] = 4.0
    logits[1, 49] = 1.0
    one = sampler()
    for row in range(2):
        one.add(row, SamplingParams(temperature=0), 1, NO_TOKENS)
    assert one.sample(logits, rows_of(0, 1), rows_of(1, 1)).tokens.tolist() == [17, 49]


def test_tokens_equal_to_the_last_of_the_top_k_stay():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    tokens = draw(logits, SamplingParams(top_k=2, seed=1), 300)
    assert set(tokens.tolist()) == {0, 2, 3}


def test_top_k_of_one_is_greedy_and_larger_than_the_vocabulary_is_no_limit():
    logits = logits_for(3)
    assert set(draw(logits, SamplingParams(top_k=1, seed=1), 50)) == {int(logits.argmax())}
    assert (
        draw(logits, SamplingParams(top_k=10**6, seed=1), 50).tolist()
        == draw(logits, SamplingParams(seed=1), 50).tolist()
    )


def test_a_tiny_top_p_keeps_the_most_likely_token():
    logits = logits_for(4)
    assert set(draw(logits, SamplingParams(top_p=1e-6, seed=1), 50)) == {int(logits.argmax())}


@pytest.mark.parametrize("params", [{"top_p": 0.95}, {"top_k": 300}, {"top_p": 0.2, "temperature": 5.0}])
def test_filters_of_a_large_vocabulary_keep_what_the_definition_keeps(params):
    params = SamplingParams(seed=9, **params)
    logits = logits_for(8, vocab=5000)
    allowed = expected(logits, params) > 0
    assert allowed[draw(logits, params, 400)].all()


def test_logprobs_are_of_the_raw_logits_whatever_the_filters():
    logits = logits_for(6)
    log_softmax = torch.log_softmax(logits.double(), dim=1)[0]
    one = sampler()
    params = SamplingParams(temperature=0.3, top_k=2, min_p=0.2, seed=4, logprobs=5, min_tokens=3)
    one.add(0, params, 0, NO_TOKENS)
    sampled = one.sample(logits.clone(), rows_of(0), rows_of(0))
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
    logits = logits_for(2)
    runs = {tuple(draw(logits, SamplingParams(seed=seed), 20).tolist()) for seed in range(10)}
    assert len(runs) == 10


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1.0)), min_size=1, max_size=1000).filter(any),
    st.floats(0, 1 - 2**-53),
)
def test_only_what_is_possible_is_drawn(probabilities, share):
    assert probabilities[draw_index(np.array(probabilities), share)] > 0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_the_share_finds_its_place(share):
    probabilities = np.full(2000, 1.0)
    assert draw_index(probabilities, share) == int(share * 2000)
