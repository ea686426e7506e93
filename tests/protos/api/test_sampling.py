"""Sampling parameters: every bad value is refused by the name of its field."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from allspan.protos.api.sampling_fields import (
    MAX_ID_SEQUENCE_LENGTH,
    MAX_ID_SEQUENCES,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
)

FIELDS = tuple(field.name for field in fields(SamplingParams))
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(-1, 9) | st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=5,
)

BAD = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", True),
    ("max_tokens", 1.0),
    ("max_tokens", "7"),
    ("max_tokens", None),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", 10**400),
    ("temperature", True),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("top_k", False),
    ("top_p", 0),
    ("top_p", 0.0),
    ("top_p", -0.1),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
    ("seed", True),
    ("seed", 1.0),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 12),
    ("stop_token_ids", range(MAX_STOP_TOKENS + 1)),
    ("stop", 3),
    ("ignore_eos", 1),
    ("do_sample", None),
    ("suppress_repetition_in_generation", "yes"),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.01),
    ("presence_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("no_repeat_ngram_size", -1),
    ("no_repeat_ngram_size", 2.0),
    ("typical_p", 0),
    ("typical_p", 1.5),
    ("logit_bias", 7),
    ("logit_bias", None),
    ("logit_bias", "ab"),
    ("logit_bias", [1, 2]),
    ("logit_bias", [[1, 2, 3]]),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 0.0)),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", [(5, 1.0), (5, 2.0)]),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", range(MAX_ALLOWED_TOKENS + 1)),
    ("bad_words_ids", 3),
    ("bad_words_ids", [[1]] * (MAX_ID_SEQUENCES + 1)),
    ("stop_words_ids", "ab"),
    ("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
    ("grammar", "json_object"),
    ("grammar", {"kind": "json_object"}),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field} ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "entry"),
    [
        ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
        ("stop_token_ids", [True], "stop_token_ids[0]"),
        ("stop_token_ids", [1.5], "stop_token_ids[0]"),
        ("stop", ["a", ""], "stop[1]"),
        ("stop", ["a", 2], "stop[1]"),
        ("stop", ["x" * 1025], "stop[0]"),
        ("allowed_token_ids", [3, 2**31], "allowed_token_ids[1]"),
        ("bad_words_ids", [[1], "ab"], "bad_words_ids[1]"),
        ("bad_words_ids", [[1], [2, None]], "bad_words_ids[1][1]"),
        ("bad_words_ids", [[1], []], "bad_words_ids[1]"),
        ("stop_words_ids", [range(MAX_ID_SEQUENCE_LENGTH + 1)], "stop_words_ids[0]"),
        ("logit_bias", {4: 100.5}, "logit_bias[4]"),
        ("logit_bias", {4: "much"}, "logit_bias[4]"),
    ],
)
def test_a_bad_entry_names_its_place(field: str, value: Any, entry: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.message.startswith(f"{entry} ")
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["temperature", "stop_token_ids", "logit_bias", "bad_words_ids", "max_tokens"])
def test_a_message_stays_short_whatever_was_sent(field: str) -> None:
    for value in ("x\n" * 100_000, [["y" * 10**6]] * 10, 10**500, {("z" * 5000, i): i for i in range(9)}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert len(caught.value.message) < 400
        assert "\n" not in caught.value.message


@given(st.builds(dict, **dict.fromkeys(FIELDS, ANYTHING)), st.sets(st.sampled_from(FIELDS), max_size=4))
def test_any_values_are_taken_as_they_are_or_refused_by_field(values: dict[str, Any], chosen: set[str]) -> None:
    refused = None
    try:
        params = SamplingParams(**{name: values[name] for name in chosen})
        assert params == params.with_()
        assert hash(params) == hash(params.with_())
    except InvalidRequest as error:
        refused = error.field
    assert refused is None or refused in chosen


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"stop_token_ids": [9, 10]}, "stop_token_ids[1]"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids[0]"),
        ({"bad_words_ids": [[1], [2, 10]]}, "bad_words_ids[1][1]"),
        ({"stop_words_ids": [[11]]}, "stop_words_ids[0][0]"),
        ({"logit_bias": {1: 2.0, 10: 1.0}}, "logit_bias has token id 10"),
    ],
)
def test_token_ids_that_a_model_does_not_have_are_refused(values: dict[str, Any], place: str) -> None:
    params = SamplingParams(**values)
    params.check_vocabulary(12)
    with pytest.raises(InvalidRequest) as caught:
        params.check_vocabulary(10)
    assert caught.value.message.startswith(place)
    assert caught.value.field == next(iter(values))


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(temperature=1, top_k=-1, logit_bias={7: 1, 3: -2})
    assert repr(params) == repr(SamplingParams(temperature=1.0, top_k=0, logit_bias=((3, -2.0), (7, 1.0))))


def test_limits_themselves_are_allowed() -> None:
    params = SamplingParams(
        max_tokens=2**31 - 1, temperature=100, top_k=-1, top_p=1, min_p=1, seed=MAX_SEED, logprobs=MAX_LOGPROBS
    )
    assert params.seed == 2**64 - 1
    assert SamplingParams(top_p=1e-9, temperature=0, logprobs=0, seed=0).is_greedy


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]


def test_a_changed_copy_is_checked_again() -> None:
    params = SamplingParams(max_tokens=4)
    assert params.with_(max_tokens=5) == SamplingParams(max_tokens=5)
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        params.with_(max_tokens=0)


def test_tiny_temperatures_count_as_greedy() -> None:
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
