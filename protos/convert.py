"""Converts between the messages of the protocol and the plain values of this package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.counters import EngineCounters, counters_of
from allspan.protos.api.errors import InternalError, InvalidRequest, from_code
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.api.sampling import SAMPLING_FIELDS, SamplingParams

_TIMINGS = tuple(field.name for field in fields(RequestTimings))

MAX_MESSAGE_BYTES = 32 * 2**20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
MAX_PENDING_CALLS = 1 << 16
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    # With more calls than this that no handler has taken up, gRPC breaks new ones off, as CANCELLED. Its own limit is
    # 1,000, and who is too much shall hear it from the queue, with the advice to come back.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
)


def sampling_to_wire(params: SamplingParams) -> bytes:
    """The fields that are not left at their defaults, as JSON. The seed must be set: every rank draws from the same
    one."""
    if params.seed is None:
        raise InternalError("sampling parameters without a seed cannot be sent")
    fields = ((name, getattr(params, name), default) for name, (default, _) in SAMPLING_FIELDS.items())
    given = {name: value for name, value, default in fields if value is not default}
    if params.grammar is not None:
        given["grammar"] = [params.grammar.kind, params.grammar.text]
    return json.dumps(given, separators=(",", ":")).encode()


def sampling_from_wire(data: bytes) -> SamplingParams:
    """Returns the parameters of a message, validated again: a rank trusts no sender."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not given.keys() <= SAMPLING_FIELDS.keys():
        raise InvalidRequest("sampling is not a JSON object with fields of SamplingParams", "sampling")
    if (grammar := given.get("grammar")) is not None:
        if not (isinstance(grammar, list) and len(grammar) == 2 and all(isinstance(part, str) for part in grammar)):
            raise InvalidRequest("grammar is not a list of its kind and its text", "grammar")
        given["grammar"] = Grammar(*grammar)
    return SamplingParams(**given)


def options_to_wire(options: RequestOptions, message: pb.StartRequestMessage) -> None:
    """Fills in the fields of `message`."""
    message.priority = options.priority
    message.timeout_s = options.timeout_s or 0.0
    message.no_prefix_cache = not options.prefix_cache
    message.no_speculation = not options.speculation
    message.cache_salt = options.cache_salt
    message.pooling = options.pooling
    message.adapter = options.adapter


def options_from_wire(message: pb.StartRequestMessage) -> RequestOptions:
    """Returns the options of a message, validated again."""
    return RequestOptions(
        priority=message.priority,
        timeout_s=message.timeout_s or None,
        prefix_cache=not message.no_prefix_cache,
        speculation=not message.no_speculation,
        cache_salt=message.cache_salt,
        pooling=message.pooling,
        adapter=message.adapter,
    )


def adapter_to_wire(adapter: AdapterModule) -> pb.Adapter:
    return pb.Adapter(**asdict(adapter))


def adapter_from_wire(message: pb.Adapter) -> AdapterModule:
    return AdapterModule(message.name, message.path, message.base_model_name, message.digest)


def adapters_to_wire(version: int, adapters: Iterable[AdapterModule]) -> pb.AdapterList:
    return pb.AdapterList(version=version, adapters=map(adapter_to_wire, adapters))


def counters_to_wire(counters: EngineCounters) -> bytes:
    """Returns each counter by its name, as JSON."""
    return json.dumps(counters_of(counters), separators=(",", ":")).encode()


def counters_from_wire(data: bytes) -> EngineCounters:
    """Returns the counters that `counters_to_wire` was given; lists are tuples. Empty: a rank that has counted
    nothing."""
    sent: dict[str, Any] = json.loads(data or b"{}")
    values: dict[str, Any] = {name: tuple(told) if isinstance(told, list) else told for name, told in sent.items()}
    return EngineCounters(**values)


def output_to_wire(request_id: bytes, output: Output) -> pb.RequestOutput:
    message = pb.RequestOutput(request_id=request_id, token_ids=output.token_ids, finish_reason=output.finish_reason)
    if output.logprobs:
        message.logprobs.extend(map(_logprob_to_wire, output.logprobs))
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(map(_logprob_to_wire, output.prompt_logprobs))
    if output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
        message.has_stop_token_id = True
    if output.vector:
        message.vector = output.vector
    if output.timings is not None:
        message.timings.CopyFrom(pb.RequestTimings(**{name: getattr(output.timings, name) for name in _TIMINGS}))
    return message


def output_from_wire(message: pb.RequestOutput) -> Output:
    has_more = message.finish_reason or message.has_stop_token_id or message.logprobs or message.prompt_logprobs
    if not (has_more or message.HasField("timings")):
        return Output(tuple(message.token_ids))  # nearly all of them
    timings = None
    if message.HasField("timings"):
        timings = RequestTimings(**{name: getattr(message.timings, name) for name in _TIMINGS})
    return Output(
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(_logprob_from_wire, message.logprobs)),
        finish_reason=message.finish_reason,
        stop_token_id=message.stop_token_id if message.has_stop_token_id else None,
        timings=timings,
        prompt_logprobs=tuple(map(_logprob_from_wire, message.prompt_logprobs)),
        vector=message.vector,
    )


def _logprob_to_wire(entry: TokenLogprob) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def _logprob_from_wire(entry: pb.TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(entry.logprob, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))


def deliver(queue: ResultQueue, message: pb.RequestOutput) -> None:
    """Puts a message's tokens or failure into its request's queue."""
    if message.error_code:
        queue.fail(from_code(message.error_code, message.error_message))
    else:
        queue.put(output_from_wire(message))
