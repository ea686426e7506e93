"""A sampler whose logits stay on the GPU gives what the host's gives: tokens, log-probabilities and failures."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from allspan.kernels.abi.sampling import ALL_MASKED, NOT_FINITE
from allspan.kernels.cuda.jit import modules
from allspan.protos.api.errors import InternalError
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.backend.cuda.sampling import DeviceSampling, device_sampling
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.sampler import Sampler
from support.threads import ThreadWorld

V = 1100
EOS = (3, 7)
ROWS = 6

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
    {"repetition_penalty": 0.7, "suppress_repetition_in_generation": True, "top_k": 9},
    {"presence_penalty": 0.9, "frequency_penalty": -0.4, "top_p": 0.8},
    {"frequency_penalty": 0.31, "repetition_penalty": 1.9, "logit_bias": {4: 7.5, 20: -3.0}, "logprobs": 0},
    {"allowed_token_ids": (1, 2, 40, 149), "logit_bias": {2: 1.0}},
    {"no_repeat_ngram_size": 1, "bad_words_ids": ((5,), (6, 8)), "temperature": 2.0},
    {"min_tokens": 8, "max_tokens": 9, "stop_token_ids": (11,), "stop_words_ids": ((12, 13),), "logprobs": 5},
    {"min_p": 0.2, "typical_p": 0.9, "prompt_logprobs": 4},
    {"logprobs": 20, "top_k": 30, "top_p": 0.7, "temperature": 0.5},
]


def pair(device: str, small: dict[str, int]) -> tuple[Sampler, Sampler]:
    """Of the device, and of the host."""
    kernel = Sampling(device=DeviceSampling(ROWS, V, torch.device(device), small))
    return tuple(Sampler(ROWS, (V,), LocalCollectives(), EOS, each) for each in (kernel, None))  # type: ignore[return-value]


def test_requests_that_come_and_go_get_the_tokens_and_log_probabilities_of_the_host(
    device: str, small: dict[str, int]
) -> None:
    rng = np.random.default_rng(4)
    both = pair(device, small)
    tokens = np.zeros((ROWS, 64), dtype=np.int32)
    lengths = np.zeros(ROWS, dtype=np.int64)
    for step in range(12):
        for row in range(ROWS):
            if step % 4 == 0 or rng.random() < 0.1:
                lengths[row] = rng.integers(1, 30)
                tokens[row] = rng.integers(0, V, 64)
                params = SamplingParams(seed=int(rng.integers(2**63)), **ASKED[rng.integers(len(ASKED))])
                for one in both:
                    one.remove(row)
                    one.add(row, params, max(int(lengths[row]) - 2, 1), tokens[row])
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].astype(np.int64)
        logits = torch.from_numpy((rng.standard_normal((len(rows), V)) * 3).astype(np.float32))
        if step % 3 == 1:
            logits[0, 9] = (math.nan, math.inf, -math.inf)[step // 3 % 3]
        targets = np.where(rng.random(len(rows)) < 0.2, 5, -1) if step % 2 else None
        ours, theirs = (
            one.sample(logits.clone().to(where), rows, lengths[rows], targets)
            for one, where in zip(both, (device, "cpu"), strict=True)
        )
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.logprobs == theirs.logprobs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        sampled = ours.tokens >= 0
        tokens[rows[sampled], lengths[rows[sampled]]] = ours.tokens[sampled]
        lengths[rows[sampled]] += 1


def test_greedy_rows_take_the_best_tokens(device: str, small: dict[str, int]) -> None:
    ours, theirs = pair(device, small)
    for row in range(ROWS):
        for one in (ours, theirs):
            one.add(row, SamplingParams(temperature=0), 1, np.zeros(9, dtype=np.int32))
    logits = torch.randn(ROWS, V, generator=torch.Generator().manual_seed(1))
    logits[1, 3], logits[2], logits[4, :] = math.nan, -math.inf, 2.0
    rows = np.arange(ROWS)
    launched = ours.launch(logits.to(device), rows, rows)
    wanted = theirs.sample(logits, rows, rows).tokens.tolist()
    assert launched.result().tokens.tolist() == wanted
    assert wanted[1:3] == [NOT_FINITE, NOT_FINITE]
    assert launched.tokens.tolist()[3:] == wanted[3:]


def test_steps_are_launched_before_the_tokens_of_the_last_one_are_known(device: str, small: dict[str, int]) -> None:
    """Penalties count them all the same, also when rows leave a step out, change places, or are asked for again."""
    ours, theirs = pair(device, small)
    asked = [each for each in ASKED if not each.keys() & {"no_repeat_ngram_size", "stop_words_ids", "prompt_logprobs"}]
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, 8, (2, ROWS, 40)).astype(np.int32)
    prompts[1] = prompts[0]
    for row in range(ROWS):
        for one, tokens in zip((ours, theirs), prompts, strict=True):
            one.add(row, SamplingParams(seed=row, **asked[row % len(asked)]), 4, tokens[row])
    assert all(ours.samples_ahead(SamplingParams(seed=0, **each)) for each in asked)
    lengths, flights = np.full(ROWS, 5), []
    for step in range(6):
        rows = rng.permutation(ROWS)[: ROWS - step % 2]
        logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(step)) * 0.1
        logits[:, :8] += 6  # few tokens, which come again
        if len(flights) == 2:
            flight, known, at, wanted = flights.pop(0)
            found = flight.result()
            assert found.tokens.tolist() == wanted.tokens.tolist()
            assert found.logprobs == wanted.logprobs
            prompts[0, known, at] = found.tokens
        at = lengths[rows]
        wanted = theirs.sample(logits.clone(), rows, at)
        prompts[1, rows, at] = wanted.tokens
        flights.append((ours.launch(logits.to(device), rows, at), rows, at, wanted))
        lengths[rows] += 1
    for flight, _, _, wanted in flights:
        assert flight.result().tokens.tolist() == wanted.tokens.tolist()


@pytest.mark.parametrize("asked", [ASKED[i] for i in (6, 7, 8)], ids=str)
def test_a_row_whose_next_step_needs_its_last_token_is_sampled_at_the_result(
    asked: dict[str, Any], device: str, small: dict[str, int]
) -> None:
    one, _ = pair(device, small)
    assert not one.samples_ahead(SamplingParams(seed=1, **asked))
    one.add(0, SamplingParams(seed=1, **asked), 1, np.zeros(9, dtype=np.int32))
    one.add(1, SamplingParams(seed=1), 1, np.zeros(9, dtype=np.int32))
    row, logits = np.array([1]), torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    late = one.launch(logits.clone().to(device), row, row)
    with pytest.raises(InternalError, match="were asked for on the device"):
        _ = late.tokens
    one.remove(0)
    early = one.launch(logits.clone().to(device), row, row)
    assert early.tokens.tolist() == late.result().tokens.tolist() == early.result().tokens.tolist()


def test_rows_that_are_all_masked_and_rows_that_came_bad_are_told_apart(device: str, small: dict[str, int]) -> None:
    one, _ = pair(device, small)
    asked = SamplingParams(temperature=0, allowed_token_ids=(4, 5), bad_words_ids=((4,), (5,)))
    for row in range(3):
        one.add(row, asked, 1, np.zeros(9, dtype=np.int32))
    one.add(3, SamplingParams(seed=3), 1, np.zeros(9, dtype=np.int32))
    logits = torch.zeros(4, V, device=device)
    logits[1, 5], logits[2], logits[3] = math.inf, -math.inf, -math.inf
    rows = np.arange(4)
    assert one.sample(logits, rows, rows + 1).tokens.tolist() == [ALL_MASKED, NOT_FINITE, NOT_FINITE, NOT_FINITE]


def test_greedy_rows_get_the_token_of_one_rank_from_each_ranks_best_column(
    device: str, small: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, lock = modules.driver(), threading.Lock()

    def launch(*arguments: Any) -> None:
        with lock:  # what is emulated has one place for a block
            driver_launch(*arguments)

    driver_launch = driver.launch
    monkeypatch.setattr(driver, "launch", launch)
    logits = torch.randn(ROWS, V, generator=torch.Generator().manual_seed(2)).round()
    logits[1, 700], logits[2], logits[3, :600] = math.nan, -math.inf, -math.inf
    rows, world, widths = np.arange(ROWS), ThreadWorld(2), (600, V - 600)

    def on_rank(rank: int) -> list[int]:
        kernel = Sampling(device=DeviceSampling(ROWS, widths[rank], torch.device(device), small))
        one = Sampler(ROWS, widths, world.collectives[rank], EOS, kernel)
        part = logits.split(widths, dim=1)[rank].contiguous().to(device)
        return [
            *one.sample(part, rows, rows).tokens.tolist(),
            *one.sample(part[:1], rows[:1], rows[:1]).tokens.tolist(),
        ]

    wanted = Sampler(ROWS, (V,), LocalCollectives(), EOS).sample(logits, rows, rows).tokens.tolist()
    assert world.run(on_rank) == [[*wanted, wanted[0]]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 151936])
def test_a_full_batch_of_a_large_vocabulary_agrees_with_the_host(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    count = 600
    kernel = Sampling(device=device_sampling(torch.device("cuda"), count, vocab))
    both = [Sampler(count, (vocab,), LocalCollectives(), EOS, each) for each in (kernel, None)]
    tokens = rng.integers(0, vocab, (count, 40)).astype(np.int32)
    for row in range(count):
        params = SamplingParams(seed=row, **ASKED[row % len(ASKED)])
        for one in both:
            one.add(row, params, 20, tokens[row])
    rows = np.arange(count)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 3
    ours = both[0].sample(logits.cuda(), rows, rows % 20 + 20)
    theirs = both[1].sample(logits, rows, rows % 20 + 20)
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.logprobs == theirs.logprobs


@pytest.mark.gpu
def test_a_captured_graph_draws_for_other_settings_and_positions() -> None:
    from allspan.kernels.abi.sampling import SETTINGS
    from allspan.kernels.cuda.sampling.sample_rows import Wanted, sample_rows
    from allspan.kernels.cuda.sampling.workspace import sampling_workspace
    from allspan.worker.sampling.kernel import sampling_kernel, settings_of

    m, vocab = 9, 32000
    workspace = sampling_workspace(m, vocab, "cuda")
    logits = torch.randn(m, vocab, device="cuda") * 3
    rows = torch.arange(m, dtype=torch.int32, device="cuda")
    positions, out = torch.zeros_like(rows), torch.zeros_like(rows)
    settings = torch.zeros((m, 40), dtype=torch.uint8, device="cuda")

    def step() -> None:
        sample_rows(logits, Wanted(rows, positions), settings, out, workspace)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    choices = [{"temperature": 0}, {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}]
    for seed in range(5):
        table = np.zeros(m, dtype=SETTINGS)
        for i in range(m):
            table[i] = settings_of(SamplingParams(seed=seed, **choices[(i + seed) % 5]))
        settings.copy_(torch.from_numpy(table.view(np.uint8).reshape(m, 40)))
        positions.fill_(seed * 1000)
        logits.normal_(std=2)
        graph.replay()
        wanted = np.zeros((m, 1), dtype=np.int32)
        ids = np.arange(m)
        sampling_kernel().sample_rows(logits.cpu().numpy(), ids, np.full(m, seed * 1000), np.full(m, -1), table, wanted)
        assert out.tolist() == wanted[:, 0].tolist()
