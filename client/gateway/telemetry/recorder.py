"""What the gateway measures of requests. On the path of a token there is one call, `RequestRecord.output`.

All seconds are differences of one process's monotonic clock: the gateway's, from a call's arrival (before its body is
read and its prompt tokenised), or the leader's (`RequestTimings`). Everything here runs on the gateway's loop.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from time import monotonic

from allspan.client.gateway.telemetry.histogram import Histogram
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import ERRORS, AllspanError, RequestCancelled
from allspan.protos.api.results import RequestTimings
from allspan.protos.cluster.logs import REQUESTS

FINISHED = ("stop", "length")
"""Reasons of requests that had what they asked for."""
MILD = ("cancelled", "deadline_exceeded")
"""Ends that are the caller's doing."""
KEPT_GAPS = 4096
"""Of so many of a request's last gaps between tokens its log line has the median."""

# fmt: off
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0,
)
_REQUEST_S = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
# fmt: on

logger = logging.getLogger(REQUESTS)


class Telemetry:
    """Counts since the gateway's start."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.started = monotonic()
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.inter_token_s = Histogram(_TOKEN_S)
        self.mean_token_s = Histogram(_TOKEN_S)
        self.total_s = Histogram(_REQUEST_S)
        self.queue_s = Histogram(_REQUEST_S)
        self.prefill_s = Histogram(_REQUEST_S)
        self.decode_s = Histogram(_REQUEST_S)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_output_tokens = Histogram(_TOKENS)
        self.prompt_tokens = 0
        """Of requests that have had their first token."""
        self.output_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISHED, 0))
        """By finish reason."""
        self.failed: Counter[str] = Counter(dict.fromkeys(ERRORS, 0))
        """By the error's code: what ended requests that were let in, and what others were refused with."""
        self.answers: Counter[tuple[str, str, int]] = Counter()
        """By method, path (as the route names it) and status."""
        self.grpc_calls: Counter[tuple[str, str]] = Counter()
        """By method and status."""

    def record(self, origin: Origin, request_id: str, num_prompt_tokens: int) -> RequestRecord:
        """For a request that was let in."""
        return RequestRecord(self, origin, request_id, num_prompt_tokens)

    def refused(self, origin: Origin, error: AllspanError, status: int | str) -> None:
        """A call that came to nothing. If its requests were let in, each of them tells its own end."""
        if origin.is_admitted:
            return
        self.failed[error.code] += 1
        if isinstance(error, RequestCancelled):
            return  # before it was anything
        logger.log(
            logging.INFO if ERRORS[error.code].http < 500 else logging.WARNING,
            "refused %s with %s: %s%s",
            origin.label,
            status,
            error.message,
            _told(origin),
            extra={"fields": _fields(origin) | {"status": status, "error": error.code}},
        )


class RequestRecord:
    """One request's times, from its call's arrival on: `output` for each output its reader gets, then `end`, once."""

    __slots__ = ("_origin", "_gaps", "_last", "_num_prompt_tokens", "_request_id", "_telemetry", "_ttft_s")

    def __init__(self, telemetry: Telemetry, origin: Origin, request_id: str, num_prompt_tokens: int) -> None:
        self._telemetry = telemetry
        self._origin = origin
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._last = 0.0
        self._ttft_s: float | None = None
        self._gaps: deque[float] = deque(maxlen=KEPT_GAPS)

    def output(self, num_tokens: int) -> None:
        """So many tokens more have come: the one call on the path of a token, to be kept cheap."""
        if not num_tokens:
            return
        now = monotonic()
        telemetry = self._telemetry
        telemetry.output_tokens += num_tokens
        if self._ttft_s is None:
            self._ttft_s = now - self._origin.arrived
            telemetry.first_token_s.observe(self._ttft_s)
            telemetry.prompt_tokens += self._num_prompt_tokens
        else:
            gap = (now - self._last) / num_tokens
            telemetry.inter_token_s.observe(gap, num_tokens)
            self._gaps.append(gap)
        self._last = now

    def end(self, reason: str, num_output_tokens: int, timings: RequestTimings | None, error: str = "") -> None:
        """`reason`: a finish reason or an error's code; `error` is then its message. Counts, and writes one line."""
        telemetry, origin = self._telemetry, self._origin
        total_s = monotonic() - origin.arrived
        (telemetry.finished if reason in FINISHED else telemetry.failed)[reason] += 1
        telemetry.total_s.observe(total_s)
        telemetry.request_prompt_tokens.observe(self._num_prompt_tokens)
        telemetry.request_output_tokens.observe(num_output_tokens)
        if self._ttft_s is not None:
            decode_s = self._last - origin.arrived - self._ttft_s
            telemetry.decode_s.observe(decode_s)
            if num_output_tokens > 1:
                telemetry.mean_token_s.observe(decode_s / (num_output_tokens - 1))
        if timings is not None:
            telemetry.queue_s.observe(timings.queue_s)
            if timings.ttft_s:
                telemetry.prefill_s.observe(timings.ttft_s - timings.queue_s)
        self._log(reason, num_output_tokens, timings, total_s, error)

    def _log(self, reason: str, num_output: int, timings: RequestTimings | None, total_s: float, error: str) -> None:
        origin = self._origin
        gaps = sorted(self._gaps)
        median = gaps[len(gaps) // 2] if gaps else None
        queue_s = timings.queue_s if timings is not None else None
        cached = timings.cached_tokens if timings is not None else 0
        logger.log(
            logging.WARNING if error and reason not in MILD else logging.INFO,
            "%s %s %s: prompt %d tokens (%d cached), output %d, queue %s, ttft %s, itl p50 %s, total %.3f s, "
            "model %s%s, reason %s%s",
            "failed" if error else "finished",
            origin.label,
            self._request_id,
            self._num_prompt_tokens,
            cached,
            num_output,
            _seconds(queue_s),
            _seconds(self._ttft_s),
            "none" if median is None else f"{1000 * median:.1f} ms",
            total_s,
            self._telemetry.model,
            _told(origin),
            reason,
            f": {error}" if error else "",
            extra={
                "fields": _fields(origin)
                | {
                    "id": self._request_id,
                    "model": self._telemetry.model,
                    "prompt_tokens": self._num_prompt_tokens,
                    "cached_tokens": cached,
                    "output_tokens": num_output,
                    "queue_s": queue_s,
                    "ttft_s": self._ttft_s,
                    "itl_p50_s": median,
                    "total_s": total_s,
                    "reason": reason,
                    "error": error,
                }
            },
        )


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f} s"


def _names(origin: Origin) -> dict[str, str]:
    named = {"owner": origin.owner, "request id": origin.name, "trace": origin.trace_id}
    return {name: value for name, value in named.items() if value}


def _told(origin: Origin) -> str:
    """ ", owner NAME, request id ID, trace ID": of these, what there is."""
    return "".join(f", {name} {value}" for name, value in _names(origin).items())


def _fields(origin: Origin) -> dict[str, object]:
    """For logs in JSON."""
    named = {name.replace(" ", "_"): value for name, value in _names(origin).items()}
    return {"call": origin.label, **named}
