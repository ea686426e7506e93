"""What callers of either engine may pass as prompts and sampling parameters, in one form and checked at the edge."""

from __future__ import annotations

import operator
import secrets
import uuid
from collections.abc import Sequence
from typing import Protocol, cast

from allspan.protos.api.engine import Prompt
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class Sizes(Protocol):
    """What bounds a prompt."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    _must_be_a_list("prompts", prompts)
    is_many = not isinstance(prompts, str) and all(hasattr(entry, "__len__") for entry in prompts)
    return list(cast(Sequence[Prompt], prompts)) if is_many else [cast(Prompt, prompts)]


def params_list(params: Params, count: int) -> list[SamplingParams]:
    """One for each prompt, each with a seed."""
    if params is None or isinstance(params, SamplingParams):
        return [with_seed(params) for _ in range(count)]
    if not isinstance(params, Sequence):
        raise InvalidRequest(f"sampling_params is {params!r}, must be SamplingParams or a list", "sampling_params")
    if len(params) != count:
        raise InvalidRequest(f"sampling_params has {len(params)} entries for {count} prompts", "sampling_params")
    return [with_seed(entry) for entry in params]


def with_seed(params: SamplingParams | None) -> SamplingParams:
    """Draws a missing seed, so that every rank uses the same one."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params is {params!r}, must be a SamplingParams", "sampling_params")
    return params if params.seed is not None else params.with_(seed=secrets.randbits(64))


def checked_options(options: RequestOptions | None) -> RequestOptions:
    if options is not None and not isinstance(options, RequestOptions):
        raise InvalidRequest(f"options is {options!r}, must be RequestOptions", "options")
    return options or RequestOptions()


def checked_ids(prompt: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """Token ids as integers. Raises InvalidRequest naming the first that is none, or is not in the vocabulary."""
    _must_be_a_list("prompt", prompt)
    if len(prompt) == 0:
        raise InvalidRequest("prompt is empty, must have at least one token", "prompt")
    if len(prompt) >= sizes.max_model_len:
        raise InvalidRequest(
            f"prompt has {len(prompt)} tokens, at most {sizes.max_model_len - 1} fit beside one new token in "
            f"max_model_len ({sizes.max_model_len})",
            "prompt",
        )
    given = tuple(prompt)
    if set(map(type, given)) == {int} and min(given) >= 0 and max(given) < sizes.vocab_size:
        return given  # as most are; one by one, a long prompt would take a millisecond for every 5,000 tokens
    ids = []
    for position, entry in enumerate(given):
        if not _is_id(entry):
            raise InvalidRequest(f"prompt[{position}] is {entry!r}, must be a token id (an integer)", "prompt")
        token_id = operator.index(entry)
        if not 0 <= token_id < sizes.vocab_size:
            last = sizes.vocab_size - 1
            raise InvalidRequest(f"prompt[{position}] is {token_id}, must be from 0 to {last}", "prompt")
        ids.append(token_id)
    return tuple(ids)


def parse_request_id(request_id: str | None) -> bytes:
    """16 bytes: the caller's 32 hexadecimal digits (a UUID, with hyphens or not), else drawn."""
    if request_id is None:
        return uuid.uuid4().bytes
    try:
        return uuid.UUID(request_id).bytes
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f"request_id is {request_id!r}, must be 32 hexadecimal digits", "request_id") from None


def _must_be_a_list(field: str, value: object) -> None:
    if isinstance(value, (bytes, dict)) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise InvalidRequest(f"{field} is {value!r}, must be text or a list of token ids", field)


def _is_id(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
