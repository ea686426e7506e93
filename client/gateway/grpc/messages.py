"""Converts between the messages of `allspan.v1` and the gateway's own values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from allspan.client.gateway.admission.active_request import ActiveRequest, PromptLogprob
from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.openai.structured import from_message
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import DeadlineExceeded, InvalidRequest
from allspan.protos.api.options import MAX_TIMEOUT_S, RequestOptions
from allspan.protos.api.results import TokenLogprob
from allspan.protos.api.sampling import MAX_LOGPROBS, SAMPLING_FIELDS
from allspan.protos.api.sampling_fields import (
    Boolean,
    Integer,
    Number,
    Rule,
    Strings,
    TokenBiases,
    TokenIds,
    TokenIdSequences,
)
from allspan.protos.text.stream.text_stream import TextDelta, TextOptions

MAX_MESSAGES = 4096
MAX_ENTRIES = 1 << 16
"""Token ids and log-probabilities in one response: about 1 MB; clients take 4 MB by default."""
MAX_PER_PLACE = 2 + MAX_LOGPROBS

_ROLES = ("system", "developer", "user", "assistant")


def _named(*kinds: type[Rule]) -> tuple[str, ...]:
    return tuple(name for name, (_, rule) in SAMPLING_FIELDS.items() if isinstance(rule, kinds))


_OPTIONAL = _named(Integer, Number, Boolean)
_LISTS = (*_named(Strings, TokenIds), "bad_words")
_SEQUENCES = _named(TokenIdSequences)
_MAPS = _named(TokenBiases)


def messages_of(chat: pb.Messages) -> list[dict[str, str]]:
    """Returns the messages for the chat template; InvalidRequest names the place of an invalid one."""
    count = len(chat.messages)
    if not 1 <= count <= MAX_MESSAGES:
        raise InvalidRequest(f"chat.messages has {count} entries, must have from 1 to {MAX_MESSAGES}", "chat.messages")
    for i, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            place = f"chat.messages[{i}].role"
            raise InvalidRequest(f"{place} is {message.role[:64]!r}, must be one of {', '.join(_ROLES)}", place)
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in chat.messages
    ]


def sampling_of(options: pb.SamplingOptions) -> dict[str, Any]:
    """The given fields of `SamplingParams`, and `bad_words`."""
    fields = {name: getattr(options, name) for name in _OPTIONAL if options.HasField(name)}
    fields = {name: value for name, value in fields.items() if value != -1 or not name.endswith("logprobs")}
    fields |= {name: tuple(values) for name in _LISTS if (values := getattr(options, name))}
    for name in _SEQUENCES:
        if sequences := getattr(options, name):
            fields[name] = tuple(tuple(sequence.ids) for sequence in sequences)
    fields |= {name: dict(values) for name in _MAPS if (values := getattr(options, name))}
    if (grammar := from_message(options)) is not None:
        fields["grammar"] = grammar
    return fields


def text_options_of(options: pb.SamplingOptions) -> TextOptions:
    return TextOptions(
        skip_special_tokens=not options.HasField("skip_special_tokens") or options.skip_special_tokens,
        include_stop=options.include_stop_str_in_output,
        detokenize=not options.HasField("detokenize") or options.detokenize,
    )


def prompt_options_of(request: pb.GenerateRequest | pb.TokenizeRequest) -> PromptOptions:
    special = request.add_special_tokens if request.HasField("add_special_tokens") else None
    parse = not request.HasField("parse_special") or request.parse_special
    begins = not request.HasField("add_generation_prompt") or request.add_generation_prompt
    if isinstance(request, pb.TokenizeRequest):
        return PromptOptions(special, parse, add_generation_prompt=begins, only_counted=True)
    last = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    return PromptOptions(special, parse, last, request.sampling.max_tokens or None, begins)


def options_of(
    request: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest, remaining_s: float | None
) -> RequestOptions:
    """`remaining_s`: what the call's deadline leaves; the shorter of it and timeout_s counts. InvalidRequest,
    DeadlineExceeded."""
    timeout = request.timeout_s or None
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the call's deadline was over before the request was read")
    asked = RequestOptions(
        priority=request.priority,
        timeout_s=timeout,
        prefix_cache=_unless_false(request, "prefix_cache"),
        cache_salt=request.cache_salt,
        speculation=not isinstance(request, pb.GenerateRequest) or _unless_false(request, "speculation"),
    )
    if remaining_s is None or remaining_s >= (timeout or MAX_TIMEOUT_S):
        return asked
    return replace(asked, timeout_s=remaining_s)


def _unless_false(request: Any, name: str) -> bool:
    """An optional field that is true where it is not set."""
    return getattr(request, name) if request.HasField(name) else True


def responses(
    request_id: str, index: int, delta: TextDelta, prompt_logprobs: Sequence[PromptLogprob], generation: ActiveRequest
) -> Iterator[pb.GenerateResponse]:
    """Returns one message, or several where the content is too large for one (of a reader that has been slow)."""
    places = len(prompt_logprobs) + len(delta.token_ids)
    if places <= MAX_ENTRIES // MAX_PER_PLACE:
        yield _response(request_id, index, delta, prompt_logprobs, generation)
        return
    widest = max((len(entry.top) for entry in (*delta.logprobs, *(entry for _, entry in prompt_logprobs))), default=0)
    step = MAX_ENTRIES // (2 + widest)
    if places <= step:
        yield _response(request_id, index, delta, prompt_logprobs, generation)
        return
    nothing = TextDelta("", (), ())
    for start in range(0, len(prompt_logprobs), step):
        yield _response(request_id, index, nothing, prompt_logprobs[start : start + step], generation)
    for start in range(0, max(len(delta.token_ids), 1), step):
        end = start + step
        is_last = end >= len(delta.token_ids)
        part = TextDelta(
            "" if start else delta.text,
            delta.token_ids[start:end],
            delta.logprobs[start:end],
            delta.finish_reason if is_last else "",
            delta.stop if is_last else None,
        )
        yield _response(request_id, index, part, (), generation)


def _response(
    request_id: str, index: int, delta: TextDelta, prompt_logprobs: Sequence[PromptLogprob], generation: ActiveRequest
) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=request_id,
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
    )
    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False):
        response.logprobs.append(_logprob(token_id, entry))
    for token_id, entry in prompt_logprobs:
        response.prompt_logprobs.append(_logprob(token_id, entry))
    if delta.finished:
        response.usage.prompt_tokens = generation.num_prompt_tokens
        response.usage.completion_tokens = generation.num_output_tokens
        response.usage.cached_tokens = generation.num_cached_tokens
        if isinstance(delta.stop, str):
            response.stop_string = delta.stop
        elif delta.stop is not None:
            response.stop_token_id = delta.stop
    return response


def _logprob(token_id: int, entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        chosen=pb.Logprob(token_id=token_id, logprob=entry.logprob),
        top=[pb.Logprob(token_id=top_id, logprob=logprob) for top_id, logprob in entry.top],
    )
