"""The prefix cache, seen from a client of two ranks: what is reported, what is shared, what is kept apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.options import RequestOptions

pytestmark = pytest.mark.timeout(180)

PAGE = 16
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def engine(start_tiny: Callable[..., ClientEngine]) -> Iterator[ClientEngine]:
    with start_tiny(page_size=PAGE, kv_cache_bytes=8_000_000) as made:
        yield made


def fresh(seed: int, length: int) -> list[int]:
    """A prompt that no other test has."""
    source = random.Random(seed)
    return [source.randrange(255) for _ in range(length)]


def test_a_second_prompt_is_a_hit_up_to_its_last_token_and_changes_nothing(engine: ClientEngine) -> None:
    prompt = fresh(1, 6 * PAGE)
    before = engine.statistics()
    first, second = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    after = engine.statistics()
    assert (first.cached_tokens, second.cached_tokens) == (0, 5 * PAGE)  # the last token is computed, to go on from
    assert (second.token_ids, second.logprobs) == (first.token_ids, first.logprobs)
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 5 * PAGE
    assert after.prefix_query_tokens > before.prefix_query_tokens
    assert after.pages_cached > 0
    assert after.pages_used == 0


def test_a_conversation_s_next_turn_finds_the_answer_cached_too(engine: ClientEngine) -> None:
    prompt = fresh(2, 2 * PAGE)
    answer = engine.generate([prompt], GREEDY)[0].token_ids
    turn = [*prompt, *answer, *fresh(3, PAGE)]
    told = engine.generate([turn], GREEDY)[0]
    engine.reset_prefix_cache()
    anew = engine.generate([turn], GREEDY)[0]
    assert told.cached_tokens == (2 * PAGE + len(answer) - 1) // PAGE * PAGE > 2 * PAGE
    assert anew.cached_tokens == 0
    assert (told.token_ids, told.logprobs) == (anew.token_ids, anew.logprobs)


def test_a_request_that_opts_out_neither_takes_nor_leaves(engine: ClientEngine) -> None:
    alone = RequestOptions(prefix_cache=False)
    prompt = fresh(4, 4 * PAGE)
    runs = [engine.generate([prompt], GREEDY, options)[0] for options in (alone, None, alone, None)]
    assert [run.cached_tokens for run in runs] == [0, 0, 0, 3 * PAGE]
    assert len({run.token_ids for run in runs}) == 1


def test_a_salt_keeps_prompts_apart(engine: ClientEngine) -> None:
    prompt = fresh(5, 4 * PAGE)
    salts = ["", "a", "b", "a", ""]
    runs = [engine.generate([prompt], GREEDY, RequestOptions(cache_salt=salt))[0] for salt in salts]
    assert [run.cached_tokens for run in runs] == [0, 0, 0, 3 * PAGE, 3 * PAGE]


def test_prompts_in_flight_together_are_computed_once(engine: ClientEngine) -> None:
    prompt = fresh(6, 40 * PAGE)
    runs = engine.generate([prompt] * 4, GREEDY)
    assert sorted(run.cached_tokens for run in runs) == [0, *[39 * PAGE] * 3]
    assert len({run.token_ids for run in runs}) == 1


def test_pages_that_are_not_used_give_way_to_those_that_are(engine: ClientEngine) -> None:
    total = engine.statistics().pages_total
    for seed in range(100, 100 + 2 * total * PAGE // 2000):
        engine.generate([fresh(seed, 2000)], GREEDY.with_(max_tokens=1))
    found = engine.statistics()
    assert found.pages_used == 0
    assert found.pages_free + found.pages_cached == total
    assert engine.generate([fresh(100, 2000)], GREEDY)[0].cached_tokens == 0  # the oldest is gone
