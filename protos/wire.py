"""Between the wire's messages and the plain values of this package."""

from __future__ import annotations

from allspan.protos import worker_pb2 as pb
from allspan.protos.errors import InternalError, from_code
from allspan.protos.results import Output, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.sampling import SamplingParams

MAX_MESSAGE_BYTES = 32 * 2**20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParamsMessage:
    """The seed must be set: every rank draws from the same one."""
    if params.seed is None:
        raise InternalError("sampling parameters without a seed cannot be sent")
    return pb.SamplingParamsMessage(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        min_tokens=params.min_tokens,
    )


def sampling_from_wire(message: pb.SamplingParamsMessage) -> SamplingParams:
    """Validates again: a rank trusts no sender."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=None if message.logprobs < 0 else message.logprobs,
        min_tokens=message.min_tokens,
    )


def output_to_wire(request_id: bytes, output: Output) -> pb.RequestOutput:
    message = pb.RequestOutput(request_id=request_id, token_ids=output.token_ids, finish_reason=output.finish_reason)
    for entry in output.logprobs:
        message.logprobs.add(
            logprob=entry.logprob,
            top_token_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
    if output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
        message.has_stop_token_id = True
    if output.timings is not None:
        t = output.timings
        message.timings.CopyFrom(
            pb.RequestTimings(
                queue_s=t.queue_s,
                ttft_s=t.ttft_s,
                total_s=t.total_s,
                prompt_tokens=t.prompt_tokens,
                cached_tokens=t.cached_tokens,
                output_tokens=t.output_tokens,
            )
        )
    return message


def output_from_wire(message: pb.RequestOutput) -> Output:
    timings = None
    if message.HasField("timings"):
        t = message.timings
        timings = RequestTimings(t.queue_s, t.ttft_s, t.total_s, t.prompt_tokens, t.cached_tokens, t.output_tokens)
    return Output(
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenLogprob(entry.logprob, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
            for entry in message.logprobs
        ),
        finish_reason=message.finish_reason,
        stop_token_id=message.stop_token_id if message.has_stop_token_id else None,
        timings=timings,
    )


def deliver(queue: ResultQueue, message: pb.RequestOutput) -> None:
    """Puts what a message says, tokens or failure, into its request's queue."""
    if message.error_code:
        queue.fail(from_code(message.error_code, message.error_message))
    else:
        queue.put(output_from_wire(message))
