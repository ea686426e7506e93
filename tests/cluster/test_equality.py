"""The same tokens on one, two and three ranks, as transformers says they should be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allspan import ClientEngine, SamplingParams
from support.default_model import chat_prompts, reference_logits
from support.equality import assert_equal_but_for_ties, assert_greedy

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("always::support.equality.TieWarning"),
]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def test_greedy_output_on_two_ranks_is_that_of_transformers(pair: ClientEngine) -> None:
    prompts = chat_prompts()[::4]
    outputs = [completion.token_ids for completion in pair.generate(prompts, GREEDY.with_(max_tokens=24))]
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert_greedy(output, reference_logits(prompt, list(output)), f"prompt {i}")
    assert sum(map(len, outputs)) > 5 * 12  # most outputs run to their full length


@pytest.mark.nightly
def test_greedy_output_is_that_of_transformers_on_any_number_of_ranks(start: Callable[..., ClientEngine]) -> None:
    prompts = chat_prompts()
    outputs = {}
    for ranks in (1, 2, 3):
        with start(ranks=ranks, max_model_len=1024) as engine:
            outputs[ranks] = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]
    for i, prompt in enumerate(prompts):
        logits = reference_logits(prompt, list(outputs[1][i]))
        assert_greedy(outputs[1][i], logits, f"prompt {i} on one rank")
        for ranks in (2, 3):
            assert_equal_but_for_ties(outputs[1][i], outputs[ranks][i], logits, f"prompt {i} on 1 and {ranks} ranks")
    assert sum(map(len, outputs[1])) > 20 * 32  # most outputs run to their full length


@pytest.mark.nightly
def test_collectives_over_mpi_give_the_greedy_output_of_the_window(
    start: Callable[..., ClientEngine], pair: ClientEngine
) -> None:
    prompts = chat_prompts()[:3]
    short = SamplingParams(max_tokens=16, temperature=0.0)
    expected = [completion.token_ids for completion in pair.generate(prompts, short)]
    with start(ranks=2, max_model_len=512, collectives="mpi") as engine:
        found = [completion.token_ids for completion in engine.generate(prompts, short)]
    for i, prompt in enumerate(prompts):
        logits = reference_logits(prompt, list(expected[i]))
        assert_equal_but_for_ties(expected[i], found[i], logits, f"prompt {i} over MPI")
