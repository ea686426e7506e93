"""What a request gets does not depend on who runs beside it, nor on how its prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from allspan import ClientEngine, SamplingParams
from support.default_model import reference_logits
from support.equality import assert_drawn

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("always::support.equality.TieWarning"),
]


def mixed_prompts(vocab_size: int) -> list[list[int]]:
    """32 prompts of 1 to 1500 tokens."""
    source = random.Random(11)
    lengths = [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 500, 1000, 1500]
    lengths += [source.randint(1, 200) for _ in range(16)]
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.nightly
def test_32_mixed_requests_at_once_equal_one_by_one_for_small_and_large_chunks(
    start: Callable[..., ClientEngine],
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    results = {}
    for chunk in (64, 2048):
        with start(ranks=2, max_model_len=2048, max_num_batched_tokens=chunk) as engine:
            prompts = mixed_prompts(engine.cluster.vocab_size)
            if chunk == 2048:
                results["one by one"] = [engine.generate(prompt, params)[0].token_ids for prompt in prompts]
            results[f"at once, {chunk}"] = [done.token_ids for done in engine.generate(prompts, params)]
    assert results["at once, 64"] == results["one by one"]
    assert results["at once, 2048"] == results["one by one"]
    assert all(len(tokens) == 12 for tokens in results["one by one"])


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(pair: ClientEngine) -> None:
    prompts = ["The weather today is", "My favourite animal is", "In the year 2050,", "She opened the door and"]
    params = [SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, top_k=50, seed=seed) for seed in (1, 2, 3, 4)]
    together = [done.token_ids for done in pair.generate(prompts, params)]
    alone = [pair.generate(prompt, each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    other = pair.generate(prompts[0], params[0].with_(seed=99))[0].token_ids
    assert together == alone
    assert other != alone[0]


@pytest.mark.nightly
def test_a_seed_gives_the_same_tokens_on_one_and_two_ranks_but_for_near_ties(
    start: Callable[..., ClientEngine], pair: ClientEngine
) -> None:
    params = [SamplingParams(max_tokens=16, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(8)]
    prompt = pair.tokenizer.encode("Tell me about")
    with start(ranks=1, max_model_len=512) as engine:
        one = [list(done.token_ids) for done in engine.generate([prompt] * 8, params)]
    two = [list(done.token_ids) for done in pair.generate([prompt] * 8, params)]
    for seed, outputs in enumerate(zip(one, two, strict=True)):
        ties = 0
        for ranks, output in enumerate(outputs, start=1):
            logits = reference_logits(prompt, output)
            ties += assert_drawn(output, logits, 0.8, seed, len(prompt), f"seed {seed} on {ranks} ranks")
        assert outputs[0] == outputs[1] or ties, f"seed {seed}: {outputs[0]} on one rank, {outputs[1]} on two"
