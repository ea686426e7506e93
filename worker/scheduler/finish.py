"""Finish reasons: when a request has all its tokens, and the timings that are reported then."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from allspan.protos.api.errors import AllspanError, DeadlineExceeded, InternalError
from allspan.protos.api.results import Output, RequestTimings
from allspan.worker.sampling.failure import failure
from allspan.worker.scheduler.plan import Run, StepResult
from allspan.worker.scheduler.request import Request


@dataclass(slots=True)
class End:
    """What a step's new tokens did to a request."""

    count: int
    """Tokens that it gets; those behind its end are cut off."""
    reason: str = ""
    """The finish reason, "" when it goes on."""
    stop_token_id: int | None = None
    error: AllspanError | None = None
    """What ended it without a finish reason."""


NO_TOKEN = End(0)
ONE_TOKEN = End(1)
"""Most steps give a request one token, with which it goes on."""


def append(request: Request, tokens: Sequence[int], eos_token_ids: Set[int], now: float) -> End:
    """Gives a request new tokens, up to the one that ends it. A negative number in the place of a token says why there
    is none; see `allspan.worker.sampling.failure`."""
    for count, token in enumerate(tokens):
        if token < 0:
            error = failure(token, request.num_tokens)
            return End(count, "" if error else "stop", error=error)
        if not request.first_token_at:
            request.first_token_at = now
        request.output_token_ids.append(token)
        reason, stop_token_id = finish(request, eos_token_ids)
        if reason:
            return End(count + 1, reason, stop_token_id)
    return ONE_TOKEN if len(tokens) == 1 else End(len(tokens))


def outputs_of(request: Request, run: Run, end: End, result: StepResult, now: float) -> list[Output | AllspanError]:
    """Returns what a step yields for the caller: `end.count` tokens, log-probabilities of the prompt, the end."""
    tokens = result.tokens.get(run.row, ())[: end.count]
    is_first = bool(tokens) and len(tokens) == len(request.output_token_ids) - request.num_resumed
    # A request that was preempted in the midst of its prompt goes through the beginning again: those are reported once.
    before = request.num_computed - run.num_tokens
    prompt_logprobs = result.prompt_logprobs.get(run.row, ())[max(0, request.num_prompt_logprobs - before) :]
    request.num_prompt_logprobs += len(prompt_logprobs)
    outputs: list[Output | AllspanError] = []
    if tokens or end.reason or (prompt_logprobs and not end.error):
        times = timings(request, now) if end.reason or is_first else None
        logprobs = result.logprobs.get(run.row, ())[: end.count]
        more = result.hidden_states.get(run.row, ()), result.vectors.get(run.row, b"")
        outputs.append(Output(tokens, logprobs, end.reason, end.stop_token_id, times, prompt_logprobs, *more))
    if end.error:
        outputs.append(end.error)
    return outputs


def finish(request: Request, eos_token_ids: Set[int]) -> tuple[str, int | None]:
    """Why the request ends with its last token, and the stop id if one did it; ("", None) when it goes on."""
    params, output = request.params, request.output_token_ids
    last = output[-1]
    if (last in eos_token_ids and not params.ignore_eos) or last in params.stop_token_ids:
        return "stop", last
    if params.stop_words_ids and len(output) >= params.min_tokens and _ends_with(output, params.stop_words_ids):
        return "stop", None
    return ("length" if len(output) >= request.max_tokens else ""), None


def vector_end(vector: bytes) -> End:
    """The end of a request with pooling, whose result has come."""
    if all(map(math.isfinite, memoryview(vector).cast("f"))):
        return End(0, "stop")
    return End(0, error=InternalError("the model's hidden states for this prompt are not finite numbers"))


def _ends_with(output: list[int], sequences: tuple[tuple[int, ...], ...]) -> bool:
    return any(len(output) >= len(words) and tuple(output[-len(words) :]) == words for words in sequences)


def timings(request: Request, now: float) -> RequestTimings:
    """`now` is on the clock of `request.arrived_at`."""
    return RequestTimings(
        queue_s=(request.started_at or now) - request.arrived_at,
        ttft_s=request.first_token_at - request.arrived_at if request.first_token_at else 0.0,
        total_s=now - request.arrived_at,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=request.cached_tokens,
        output_tokens=len(request.output_token_ids),
        arrived_at=request.arrived_wall,
        host_cached_tokens=request.host_cached_tokens,
        preemptions=request.preemptions,
    )


def timed_out(request: Request) -> DeadlineExceeded:
    """Returns the error of a request whose `timeout_s` is over, before it is ended."""
    where = "running" if request.row >= 0 else "waiting"
    return DeadlineExceeded(
        f"timeout_s is {request.options.timeout_s:g}: the request was still {where} then, with "
        f"{len(request.output_token_ids)} of {request.max_tokens} tokens; allow more time, or ask for less"
    )
