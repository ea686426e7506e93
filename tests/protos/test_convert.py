"""Messages and values: there and back."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import InternalError, InvalidRequest, QueueFull
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.results import Output, RequestState, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.api.sampling import SAMPLING_FIELDS, SamplingParams
from allspan.protos.convert import deliver, output_from_wire, output_to_wire, sampling_from_wire, sampling_to_wire
from allspan.protos.inference_pb2 import SamplingOptions

ids = st.integers(0, 2**31 - 1)
logprob = st.floats(max_value=0, allow_nan=False, width=32)
seconds = st.floats(0, 1e6)
id_sequences = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple)

grammars = st.sampled_from([Grammar("json_object"), Grammar("choice", '["a", "ä"]'), Grammar("regex", "[0-9]+\\x00")])


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**31 - 1))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.floats(0, 100)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=64))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_words_ids=draw(id_sequences),
        bad_words_ids=draw(id_sequences),
        allowed_token_ids=tuple(draw(st.lists(ids, max_size=9))),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100), max_size=9)),
        do_sample=draw(st.booleans()),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        repetition_penalty=draw(st.floats(0, 2, exclude_min=True)),
        suppress_repetition_in_generation=draw(st.booleans()),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        no_repeat_ngram_size=draw(st.integers(0, 2**31 - 1)),
        typical_p=draw(st.floats(0, 1, exclude_min=True)),
        grammar=draw(st.none() | grammars),
    )


outputs = st.builds(
    Output,
    token_ids=st.lists(ids, max_size=5).map(tuple),
    logprobs=st.lists(
        st.builds(TokenLogprob, logprob, st.lists(st.tuples(ids, logprob), max_size=3).map(tuple)), max_size=5
    ).map(tuple),
    finish_reason=st.sampled_from(["", "stop", "length", "cancelled"]),
    stop_token_id=st.none() | ids,
    timings=st.none() | st.builds(RequestTimings, seconds, seconds, seconds, ids, ids, ids),
)


@given(sampling())
def test_sampling_parameters_survive(params: SamplingParams) -> None:
    message = pb.StartRequestMessage(sampling=sampling_to_wire(params))
    sent = sampling_from_wire(pb.StartRequestMessage.FromString(message.SerializeToString()).sampling)
    assert sent == params
    assert repr(sent) == repr(params)


@given(outputs)
def test_outputs_survive(output: Output) -> None:
    message = pb.RequestOutput.FromString(output_to_wire(b"x" * 16, output).SerializeToString())
    assert message.request_id == b"x" * 16
    assert output_from_wire(message) == output


def test_minus_one_means_the_whole_vocabulary() -> None:
    assert sampling_from_wire(sampling_to_wire(SamplingParams(top_k=-1, seed=1))).top_k == 0


def test_a_missing_seed_is_our_own_mistake() -> None:
    with pytest.raises(InternalError, match="seed"):
        sampling_to_wire(SamplingParams())


def test_a_rank_trusts_no_sender() -> None:
    with pytest.raises(InvalidRequest, match="temperature is nan"):
        sampling_from_wire(json.dumps({"seed": 1, "temperature": math.nan}).encode())


def test_every_sampling_field_is_in_the_public_messages() -> None:
    public = set(SamplingOptions.DESCRIPTOR.fields_by_name)
    assert set(SAMPLING_FIELDS) - public == {"grammar"}  # which is `structured` there


def test_an_output_is_delivered() -> None:
    queue = ResultQueue()
    deliver(queue, output_to_wire(b"x" * 16, Output((1, 2), finish_reason="stop")))
    assert queue.get() == Output((1, 2), finish_reason="stop")


def test_a_failure_is_delivered_as_its_class() -> None:
    queue = ResultQueue()
    deliver(queue, pb.RequestOutput(error_code="queue_full", error_message="1024 wait"))
    assert queue.state is RequestState.FAILED
    with pytest.raises(QueueFull, match="1024 wait"):
        queue.get()
