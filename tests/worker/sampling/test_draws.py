"""What is drawn follows the distribution that was asked for; compiled code and numpy draw the same tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from allspan.kernels.abi.sampling import SETTINGS
from allspan.kernels.reference import sampling as reference
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.sampling.kernel import ReferenceKernel, SamplingKernel, Settings, sampling_kernel, settings_of

V = 50


def table(*params: SamplingParams) -> Settings:
    settings = np.zeros(len(params), dtype=SETTINGS)
    for i, each in enumerate(params):
        settings[i] = settings_of(each)
    return settings


def logits_for(seed: int, m: int = 1, vocab: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((m, vocab)) * 2).astype(np.float32)


def tokens_of(kernel: SamplingKernel, logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """`count` tokens for the same logits [1, vocabulary], at positions 0 … count - 1."""
    out = np.zeros((count, 1), dtype=np.int32)
    rows = np.zeros(count, dtype=np.int64)
    repeated = np.repeat(logits, count, axis=0)
    kernel.sample_rows(repeated, rows, np.arange(count), np.full(count, -1), table(params), out)
    return out[:, 0]


def warped(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution as transformers defines it."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits, dtype=torch.float64))
    return torch.softmax(scores, dim=-1)[0].numpy()


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"typical_p": 0.2, "temperature": 2.0},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.8},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_even_shares_give_each_token_its_probability(case: dict[str, Any]) -> None:
    for seed in range(3):
        params = SamplingParams(seed=1, **case)
        logits = logits_for(seed)
        count = 1500
        drawn = [reference.draw(logits[0], table(params)[0], (i + 0.5) / count) for i in range(count)]
        assert drawn == sorted(drawn)
        shares = np.bincount(drawn, minlength=V) / count
        probabilities = warped(logits, params)
        assert np.abs(shares - probabilities).max() < 1.5 / count
        assert shares[probabilities == 0].sum() == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_pass_a_chi_square_test(case: dict[str, Any]) -> None:
    params = SamplingParams(seed=11, **case)
    logits = logits_for(5)
    count = 6000
    probabilities = warped(logits, params)
    counts = np.bincount(tokens_of(sampling_kernel(), logits, params, count), minlength=V)
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


@pytest.mark.parametrize("case", [{"top_p": 0.95}, {"top_k": 300}, {"top_p": 0.2, "temperature": 5.0}, {"min_p": 0.2}])
def test_filters_of_a_large_vocabulary_keep_what_the_definition_keeps(case: dict[str, Any]) -> None:
    params = SamplingParams(seed=9, **case)
    logits = logits_for(8, vocab=5000)
    assert (warped(logits, params)[tokens_of(sampling_kernel(), logits, params, 300)] > 0).all()


def test_tokens_equal_to_the_last_of_the_top_k_stay() -> None:
    logits = np.array([[3.0, 1.0, 2.0, 2.0, 0.0]], dtype=np.float32)
    tokens = tokens_of(sampling_kernel(), logits, SamplingParams(top_k=2, seed=1), 300)
    assert set(tokens.tolist()) == {0, 2, 3}


def test_top_p_of_one_is_the_whole_distribution() -> None:
    logits = np.zeros((1, 8), dtype=np.float32)
    tokens = tokens_of(sampling_kernel(), logits, SamplingParams(top_p=1, seed=1), 400)
    assert set(tokens.tolist()) == set(range(8))


def test_top_k_of_one_is_greedy_and_larger_than_the_vocabulary_is_no_limit() -> None:
    logits, kernel = logits_for(3), sampling_kernel()
    assert set(tokens_of(kernel, logits, SamplingParams(top_k=1, seed=1), 50)) == {int(logits.argmax())}
    unlimited = tokens_of(kernel, logits, SamplingParams(seed=1), 50)
    assert tokens_of(kernel, logits, SamplingParams(top_k=10**6, seed=1), 50).tolist() == unlimited.tolist()


@pytest.mark.parametrize("case", [{"do_sample": False}, {"temperature": 0}, {"top_p": 1e-6}, {"min_p": 1}])
def test_what_leaves_one_token_takes_the_largest(case: dict[str, Any]) -> None:
    logits = logits_for(4)
    assert set(tokens_of(sampling_kernel(), logits, SamplingParams(seed=1, **case), 50)) == {int(logits.argmax())}


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros((1, 200), dtype=np.float32)
    logits[0, [117, 130]] = 4.0
    assert tokens_of(sampling_kernel(), logits, SamplingParams(temperature=0), 1).tolist() == [117]


@st.composite
def rows_of_logits(draw: st.DrawFn) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    m, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 50, 63, 64, 65, 129, 3000]))
    logits = rng.standard_normal((m, vocab)) * draw(st.sampled_from([0, 1e-6, 0.1, 2, 10, 1e36]))
    if draw(st.booleans()):
        logits = logits.round()  # so that some are equal
    if draw(st.booleans()):
        logits[rng.random(logits.shape) < 0.5] = -math.inf
    for bad in draw(st.sampled_from([(), (), (math.nan,), (math.inf,), (math.nan, math.inf)])):
        logits[rng.integers(m), rng.integers(vocab)] = bad
    return logits.astype(np.float32)


row_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 2e-5, 0.3, 1.0, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 129, 700]),
    top_p=st.sampled_from([1.0, 1.0, 1 - 2**-53, 0.9, 0.2, 1e-300]),
    min_p=st.sampled_from([0.0, 0.0, 1e-300, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.2, 1e-300]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(deadline=None, max_examples=400)
@given(rows_of_logits(), st.lists(row_params, min_size=4, max_size=4), st.integers(0, 2**40), st.integers(-1, 20))
def test_compiled_code_and_numpy_give_the_same_bits(
    logits: np.ndarray, params: list[SamplingParams], position: int, count: int
) -> None:
    kernel = sampling_kernel()
    if isinstance(kernel, ReferenceKernel):
        pytest.skip("the compiled kernels are not installed")
    m, vocab = logits.shape
    rows = np.arange(m)[::-1].copy()
    targets = np.where(np.arange(m) == 2, 0, -1)
    counts = np.full(m, min(count, vocab))
    results = []
    for each in (kernel, ReferenceKernel()):
        out = np.zeros((m, 42), dtype=np.int32)
        with np.errstate(over="ignore", invalid="ignore"):
            each.sample_rows(logits, rows, np.arange(m) + position, targets, table(*params), out)
            each.log_softmax_rows(logits, counts, out)
        results.append(out.tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 300, 3001])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_the_best_tokens_are_those_of_greedy_rows(m: int, vocab: int, threads: int) -> None:
    native = pytest.importorskip("allspan.kernels.cpu._native")
    kernel = sampling_kernel(native.Runtime(native.variants()[-1], threads, []))
    greedy = table(SamplingParams(temperature=0))
    odd = (math.nan, math.inf, -math.inf)
    for case in range(24):
        logits = np.round(logits_for(case, m, vocab))  # many are equal
        row, column = case % m, (case * 31) % vocab
        if case % 4 < 3:
            logits[row, column] = odd[case % 4]
        if case % 6 == 5:
            logits[row] = -math.inf
        rows = np.zeros(m, dtype=np.int64)
        wanted = np.zeros((m, 1), dtype=np.int32)
        ReferenceKernel().sample_rows(logits, rows, rows, np.full(m, -1), greedy, wanted)
        for each in (kernel, ReferenceKernel()):
            found = np.full(m, 99, dtype=np.int32)
            each.best_tokens(logits, found)
            assert found.tolist() == wanted[:, 0].tolist()


def test_threads_change_nothing() -> None:
    native = pytest.importorskip("allspan.kernels.cpu._native")
    logits = logits_for(1, 9, 3000)
    params = [SamplingParams(seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(9)]
    results = []
    for runtime in (None, native.Runtime(native.variants()[-1], 3, [])):
        out = np.zeros((9, 1), dtype=np.int32)
        rows = np.arange(9)
        sampling_kernel(runtime).sample_rows(logits, rows, rows, np.full(9, -1), table(*params), out)
        results.append(out.tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize("kernel", [sampling_kernel(), ReferenceKernel()], ids=["default", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_gives_no_token(kernel: SamplingKernel, bad: float) -> None:
    logits = logits_for(1)
    logits[0, 17] = bad
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1, top_p=0.5)):
        assert tokens_of(kernel, logits, params, 2).tolist() == [-1, -1]


@pytest.mark.parametrize("kernel", [sampling_kernel(), ReferenceKernel()], ids=["default", "reference"])
def test_no_masked_token_is_drawn_and_when_all_are_masked_none_is(kernel: SamplingKernel) -> None:
    logits = np.full((1, V), -math.inf, dtype=np.float32)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=1, typical_p=0.5)):
        assert tokens_of(kernel, logits, params, 2).tolist() == [-2, -2]
        one = logits.copy()
        one[0, 33] = -1e30
        assert tokens_of(kernel, one, params, 5).tolist() == [33] * 5


def test_weights_are_the_exponentials_to_float_precision() -> None:
    z = -np.linspace(0, 20, 5000).astype(np.float32)
    assert reference.weights(z) == pytest.approx(np.exp(z.astype(np.float64)), rel=2e-7, abs=1e-11)
    assert reference.weights(np.float32([0, -math.inf])).tolist() == [1, 0]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_the_share_finds_its_place(share: float) -> None:
    logits = np.zeros(2000, dtype=np.float32)
    assert reference.draw(logits, table(SamplingParams(seed=1))[0], share) == int(share * 2000)
