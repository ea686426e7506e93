"""What can never run is refused at the edge, with field, value and limit."""

import dataclasses

import pytest

from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.scheduler.limits import GroupLimits, Limits
from support.cores import request

LIMITS = Limits(
    vocab_size=100,
    max_model_len=32,
    page_size=4,
    num_pages=100,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_queued_requests=2,
)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, ["prompt_token_ids is empty"]),
        ([1, 2, 100, 101], {}, ["prompt_token_ids[2] is token id 100", "99"]),
        ([1, -3], {}, ["prompt_token_ids[1] is token id -3"]),
        ([1] * 32, {}, ["32 tokens", "31", "max_model_len"]),
        ([1] * 40, {}, ["40 tokens", "31"]),
        ([1], {"stop_token_ids": (5, 100)}, ["stop_token_ids[1] is 100", "99"]),
        ([1], {"logit_bias": {100: 1.0}}, ["logit_bias", "100"]),
        ([1], {"allowed_token_ids": (1, 100)}, ["allowed_token_ids[1] is 100"]),
        ([1], {"bad_words_ids": ((1,), (2, 100))}, ["bad_words_ids[1][1] is 100"]),
        ([1], {"stop_words_ids": ((100,),)}, ["stop_words_ids[0][0] is 100"]),
    ],
)
def test_a_bad_request_is_refused_by_name(prompt, params, words):
    with pytest.raises(InvalidRequest) as caught:
        LIMITS.admit(request(1, prompt, **params))
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "output", "words"),
    [
        ([1, 2], [3] * 4, "output_token_ids has 4 tokens, must have fewer than the request may get (4)"),
        ([1] * 30, [3] * 2, "output_token_ids has 2 tokens, must have fewer than the request may get (2)"),
        ([1, 2], [3, 100], "output_token_ids[1] is token id 100, must be from 0 to 99"),
    ],
    ids=["all of max_tokens", "all of the context", "no such token"],
)
def test_a_resumption_that_cannot_go_on_is_refused(prompt, output, words):
    one = request(1, prompt, max_tokens=4)
    one.output_token_ids, one.num_resumed = output, len(output)
    with pytest.raises(InvalidRequest) as caught:
        LIMITS.admit(one)
    assert words in caught.value.message
    assert caught.value.field == "output_token_ids"


def test_max_tokens_is_cut_to_the_rest_of_the_context():
    one = request(1, [1] * 30, max_tokens=1000)
    LIMITS.admit(one)
    assert one.max_tokens == 2


def test_the_longest_prompt_leaves_one_token():
    one = request(1, [1] * 31, max_tokens=5)
    LIMITS.admit(one)
    assert one.max_tokens == 1


def test_a_request_larger_than_the_whole_cache_is_refused_with_numbers():
    small = dataclasses.replace(LIMITS, num_pages=2)
    with pytest.raises(InvalidRequest, match=r"5.*12.*need 4 pages of 4 tokens.*has 2; at most 9 tokens"):
        small.admit(request(1, [1] * 5, max_tokens=12))


def test_a_request_that_just_fills_the_cache_is_let_in():
    small = dataclasses.replace(LIMITS, num_pages=2)
    small.admit(request(1, [1] * 5, max_tokens=4))
    with pytest.raises(InvalidRequest):
        small.admit(request(1, [1] * 5, max_tokens=5))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Limits) if field.init])
def test_a_limit_below_one_is_refused(field):
    with pytest.raises(ConfigError, match=f"{field} is 0"):
        dataclasses.replace(LIMITS, **{field: 0})


def test_a_budget_smaller_than_the_rows_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 3, must be at least max_num_seqs"):
        dataclasses.replace(LIMITS, max_num_batched_tokens=3)


@pytest.mark.parametrize(
    ("resumed", "words"),
    [
        ([5, 100], ["output_token_ids[1] is token id 100", "99"]),
        ([1] * 7, ["output_token_ids has 7 tokens", "7"]),
        ([1] * 8, ["output_token_ids has 8 tokens", "7"]),
    ],
)
def test_output_that_a_request_comes_with_is_checked(resumed, words):
    one = request(1, [1] * 25, max_tokens=20)
    one.output_token_ids, one.num_resumed = resumed, len(resumed)
    with pytest.raises(InvalidRequest) as caught:
        LIMITS.admit(one)
    assert caught.value.field == "output_token_ids"
    assert all(word in caught.value.message for word in words), caught.value.message


def test_there_are_logits_for_every_row_and_for_a_chunk():
    assert LIMITS.max_logits_rows == 64
    assert dataclasses.replace(LIMITS, max_num_seqs=100, max_num_batched_tokens=100).max_logits_rows == 100


def test_the_tokens_of_a_group_that_keeps_all_are_those_of_its_pages():
    limits = dataclasses.replace(LIMITS, max_model_len=30)
    assert limits.context_tokens([7]) == (28,)


def test_pages_behind_a_window_hold_whole_contexts():
    """A full context of 32 tokens takes 8 pages of 4, with a window of 5 in steps of 4 tokens 3 pages."""
    small = dataclasses.replace(LIMITS, max_num_seqs=4, max_num_batched_tokens=4)
    window = GroupLimits(6, PageLifetime(window=5))
    assert dataclasses.replace(small, more_groups=(window,)).context_tokens([100, 6]) == (400, 64)
