"""Sampling parameters: every bad value is refused by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from allspan.protos.errors import InvalidRequest
from allspan.protos.sampling import MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS, MAX_STOP_TOKENS, SamplingParams

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
    ("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
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
    ],
)
def test_a_bad_entry_names_its_place(field: str, value: Any, entry: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{entry.replace('[', '.').replace(']', '.')} "):
        SamplingParams(**{field: value})


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
