"""The prompts and sampling parameters that either engine accepts, normalised and validated."""

from __future__ import annotations

import operator
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from allspan.protos.api.engine import Prompt
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
Defaults = Callable[[], SamplingParams]
"""Returns the parameters of a request that gives none."""


class Sizes(Protocol):
    """The sizes of a model that bound a prompt."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or many as a list. A list of integers is one prompt."""
    _must_be_a_list("prompts", prompts)
    is_many = not isinstance(prompts, str) and all(hasattr(entry, "__len__") for entry in prompts)
    return list(cast(Sequence[Prompt], prompts)) if is_many else [cast(Prompt, prompts)]


def params_list(params: Params, count: int, defaults: Defaults = SamplingParams) -> list[SamplingParams]:
    """Returns sampling parameters for each prompt, each with a seed."""
    if params is None or isinstance(params, SamplingParams):
        return [with_seed(params, defaults) for _ in range(count)]
    if not isinstance(params, Sequence):
        raise InvalidRequest(f"sampling_params is {params!r}, must be SamplingParams or a list", "sampling_params")
    if len(params) != count:
        raise InvalidRequest(f"sampling_params has {len(params)} entries for {count} prompts", "sampling_params")
    return [with_seed(entry, defaults) for entry in params]


def with_seed(params: SamplingParams | None, defaults: Defaults = SamplingParams) -> SamplingParams:
    """Draws a missing seed, so that every rank uses the same one."""
    params = defaults() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params is {params!r}, must be a SamplingParams", "sampling_params")
    return params if params.seed is not None else params.with_(seed=secrets.randbits(64))


def conversation(messages: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages of a conversation; a text is one message of a user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def checked_options(options: RequestOptions | None) -> RequestOptions:
    if options is not None and not isinstance(options, RequestOptions):
        raise InvalidRequest(f"options is {options!r}, must be RequestOptions", "options")
    return options or RequestOptions()


def checked_ids(prompt: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """The token ids of a prompt as integers. Raises InvalidRequest naming the first bad entry, or the length."""
    _must_be_a_list("prompt", prompt)
    check_length(len(prompt), sizes)
    ids = tuple(prompt)
    if set(map(type, ids)) != {int}:
        for position, entry in enumerate(ids):
            if not _is_id(entry):
                raise InvalidRequest(f"prompt[{position}] is {entry!r}, must be a token id (an integer)", "prompt")
        ids = tuple(map(operator.index, ids))
    check_ids(ids, sizes)
    return ids


def check_length(length: int, sizes: Sizes, field: str = "prompt") -> None:
    """Raises InvalidRequest for a prompt of no tokens, and for one that leaves no room for a new token."""
    if length == 0:
        raise InvalidRequest(f"{field} is empty, must have at least one token", field)
    if length >= sizes.max_model_len:
        raise InvalidRequest(
            f"{field} has {length} tokens, at most {sizes.max_model_len - 1} leave room for a new one in the context "
            f"(max_model_len) of {sizes.max_model_len}",
            field,
        )


def check_ids(ids: Sequence[int], sizes: Sizes, field: str = "prompt") -> None:
    """Raises InvalidRequest naming the first token id that is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < sizes.vocab_size:
        index, bad = next((i, token_id) for i, token_id in enumerate(ids) if not 0 <= token_id < sizes.vocab_size)
        raise InvalidRequest(f"{field}[{index}] is token id {bad}, must be from 0 to {sizes.vocab_size - 1}", field)


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
