"""When a request has all its tokens, and what is told of how it went."""

from __future__ import annotations

from collections.abc import Set

from allspan.protos.api.results import RequestTimings
from allspan.worker.scheduler.request import Request


def finish(request: Request, eos_token_ids: Set[int]) -> tuple[str, int | None]:
    """Why the request ends with its last token, and the stop id if one did it; ("", None) when it goes on."""
    params, output = request.params, request.output_token_ids
    last = output[-1]
    if (last in eos_token_ids and not params.ignore_eos) or last in params.stop_token_ids:
        return "stop", last
    if params.stop_words_ids and len(output) >= params.min_tokens and _ends_with(output, params.stop_words_ids):
        return "stop", None
    return ("length" if len(output) >= request.max_tokens else ""), None


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
