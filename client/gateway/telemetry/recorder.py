"""The gateway's measurements of requests. On the path of a token there is one call, `RequestRecord.output`.

All seconds are differences of one process's monotonic clock: the gateway's, from a call's arrival (before its body is
read and its prompt tokenised), or the leader's (`RequestTimings`). Everything here runs on the gateway's loop.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from time import monotonic

from allspan.client.gateway.telemetry.request_context import Origin
from allspan.client.gateway.telemetry.request_histograms import RequestHistograms
from allspan.client.gateway.telemetry.traces import EndedRequest, Traces
from allspan.protos.api.errors import ERRORS, AllspanError, RequestCancelled
from allspan.protos.api.results import RequestHandle, RequestTimings
from allspan.protos.cluster.logs import REQUESTS

FINISHED = ("stop", "length")
"""The finish reasons of requests that completed."""
MILD = ("cancelled", "deadline_exceeded")
"""Ends that are the caller's doing."""
KEPT_GAPS = 4096
"""Number of a request's last gaps between tokens whose median its log line has."""

logger = logging.getLogger(REQUESTS)


class Telemetry:
    """The counts since the gateway's start."""

    def __init__(self, model: str, traces: Traces | None = None, hide: Callable[[str], str] = str) -> None:
        """`hide`: takes API keys out of a text that a caller had a part in."""
        self.model = model
        self.traces = traces
        self.hide = hide
        self.started = monotonic()
        self.histograms = RequestHistograms()
        self.prompt_tokens = 0
        """Prompt tokens of requests that have had their first token."""
        self.output_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISHED, 0))
        """Finished requests by finish reason."""
        self.failed: Counter[str] = Counter(dict.fromkeys(ERRORS, 0))
        """Errors by their code: of admitted requests, and of refused calls."""
        self.answers: Counter[tuple[str, str, int]] = Counter()
        """HTTP answers by method, path (as the route names it) and status."""
        self.grpc_calls: Counter[tuple[str, str]] = Counter()
        """gRPC calls by method and status."""

    def record(self, origin: Origin, handle: RequestHandle, num_prompt_tokens: int) -> RequestRecord:
        """Returns the record of an admitted request."""
        return RequestRecord(self, origin, handle, num_prompt_tokens)

    def refused(self, origin: Origin, error: AllspanError, status: int | str) -> None:
        """Counts a refused call. If its requests were admitted, each of them records its own end. If its requests were
        let in, each of them tells its own end."""
        if origin.is_admitted:
            return
        origin.label = self.hide(origin.label)
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
        if self.traces is not None:
            self.traces.refused(origin, self.model, error.code, self.hide(error.message))


class RequestRecord:
    """One request's times, from its call's arrival on: `output` for each output its reader gets, then `end`, once."""

    __slots__ = ("_gaps", "_handle", "_last", "_num_prompt_tokens", "_origin", "_telemetry", "_ttft_s")

    def __init__(self, telemetry: Telemetry, origin: Origin, handle: RequestHandle, num_prompt_tokens: int) -> None:
        self._telemetry = telemetry
        self._origin = origin
        self._handle = handle
        self._num_prompt_tokens = num_prompt_tokens
        self._last = 0.0
        self._ttft_s: float | None = None
        self._gaps: deque[float] = deque(maxlen=KEPT_GAPS)

    def output(self, num_tokens: int) -> None:
        """Records that `num_tokens` more tokens have come: the one call on the path of a token, to be kept cheap."""
        if not num_tokens:
            return
        now = monotonic()
        telemetry = self._telemetry
        telemetry.output_tokens += num_tokens
        if self._ttft_s is None:
            self._ttft_s = now - self._origin.arrived
            telemetry.histograms.first_token_s.observe(self._ttft_s)
            telemetry.prompt_tokens += self._num_prompt_tokens
        else:
            gap = (now - self._last) / num_tokens
            telemetry.histograms.inter_token_s.observe(gap, num_tokens)
            self._gaps.append(gap)
        self._last = now

    def end(self, reason: str, num_output_tokens: int, timings: RequestTimings | None, error: str = "") -> None:
        """`reason`: a finish reason or an error's code; `error` is then its message. Counts, and writes one line."""
        telemetry, origin = self._telemetry, self._origin
        total_s = monotonic() - origin.arrived
        (telemetry.finished if reason in FINISHED else telemetry.failed)[reason] += 1
        telemetry.histograms.total_s.observe(total_s)
        telemetry.histograms.request_prompt_tokens.observe(self._num_prompt_tokens)
        telemetry.histograms.request_output_tokens.observe(num_output_tokens)
        if self._ttft_s is not None:
            decode_s = self._last - origin.arrived - self._ttft_s
            telemetry.histograms.decode_s.observe(decode_s)
            if num_output_tokens > 1:
                telemetry.histograms.mean_token_s.observe(decode_s / (num_output_tokens - 1))
        if timings is not None:
            telemetry.histograms.queue_s.observe(timings.queue_s)
            if timings.ttft_s:
                telemetry.histograms.prefill_s.observe(timings.ttft_s - timings.queue_s)
        self._log(reason, num_output_tokens, timings, total_s, error)
        if telemetry.traces is not None:
            origin.label = telemetry.hide(origin.label)
            telemetry.traces.request(
                EndedRequest(
                    origin,
                    telemetry.hide(self._handle.request_id),
                    self._handle.model,
                    self._num_prompt_tokens,
                    num_output_tokens,
                    self._ttft_s,
                    timings,
                    reason,
                    telemetry.hide(error),
                )
            )

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
            self._handle.request_id,
            self._num_prompt_tokens,
            cached,
            num_output,
            _seconds(queue_s),
            _seconds(self._ttft_s),
            "none" if median is None else f"{1000 * median:.1f} ms",
            total_s,
            self._handle.model,
            _told(origin),
            reason,
            f": {error}" if error else "",
            extra={
                "fields": _fields(origin)
                | {
                    "id": self._handle.request_id,
                    "model": self._handle.model,
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
    """Returns the fields of an origin for logs in JSON."""
    named = {name.replace(" ", "_"): value for name, value in _names(origin).items()}
    return {"call": origin.label, **named}
