"""A request's states and its digest."""

import dataclasses
import itertools

import pytest

from allspan.protos.api.errors import InternalError
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.scheduler.request import TRANSITIONS, Request, RequestStatus
from support.cores import request

ENDS = {RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestStatus, RequestStatus)))
def test_only_the_table_s_steps_are_taken(before, after):
    one = request(1, [1])
    one.status = before
    if after in TRANSITIONS[before]:
        one.move(after)
        assert one.status is after
    else:
        with pytest.raises(InternalError, match=f"from {before.value} to {after.value}"):
            one.move(after)


def test_nothing_leaves_an_end():
    assert {status for status, following in TRANSITIONS.items() if not following} == ENDS


def test_equal_payloads_have_equal_digests():
    assert request(7, [1, 2, 3]).digest() == request(7, [1, 2, 3]).digest()


PARAMS = SamplingParams(max_tokens=20, temperature=0.5, seed=3)
OTHERS = {
    "max_tokens": 21,
    "temperature": 0.25,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "seed": 4,
    "stop_token_ids": (1,),
    "ignore_eos": True,
    "logprobs": 0,
    "min_tokens": 1,
    "prompt_logprobs": 0,
    "do_sample": False,
    "repetition_penalty": 1.5,
    "suppress_repetition_in_generation": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram_size": 2,
    "typical_p": 0.5,
    "logit_bias": {1: 2.0},
    "allowed_token_ids": (1,),
    "bad_words_ids": ((1,),),
    "stop_words_ids": ((1,),),
    "grammar": Grammar("json_object"),
}


@pytest.mark.parametrize(("field", "value"), list(OTHERS.items()))
def test_each_parameter_changes_the_digest(field, value):
    before = Request(bytes(16), "c", (1, 2), PARAMS)
    after = Request(bytes(16), "c", (1, 2), PARAMS.with_(**{field: value}))
    assert before.digest() != after.digest()


def test_every_parameter_that_a_rank_sees_is_in_the_digest():
    assert set(OTHERS) == {field.name for field in dataclasses.fields(SamplingParams)} - {"stop"}


@pytest.mark.parametrize("ids", [(2, 1), (1, 2, 0), (1,), (1, 3)])
def test_the_prompt_changes_the_digest(ids):
    assert Request(bytes(16), "c", (1, 2), PARAMS).digest() != Request(bytes(16), "c", ids, PARAMS).digest()


def test_a_prompt_token_is_no_stop_token():
    one = Request(bytes(16), "c", (1, 2), PARAMS)
    other = Request(bytes(16), "c", (1,), PARAMS.with_(stop_token_ids=(2,)))
    assert one.digest() != other.digest()


def test_a_request_without_a_seed_is_refused():
    with pytest.raises(InternalError, match="seed"):
        Request(bytes(16), "c", (1,), SamplingParams())


def test_an_id_of_another_length_is_refused():
    with pytest.raises(InternalError, match="15 bytes"):
        Request(bytes(15), "c", (1,), PARAMS)
