"""OpenTelemetry spans of requests, exported over OTLP: one for the request, one for each of its phases.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI. A request's spans are made
when it ends, from the times that were recorded anyway: nothing is done on the path of a token. They hold no text of a
prompt or an answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.results import RequestTimings
from allspan.protos.config.installed import install_command

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
GRPC, HTTP = "grpc", "http/protobuf"
GRPC_PORT = ":4317"
"""The port on which collectors take gRPC; 4318 takes HTTP."""
FLUSH_S = 2.0
"""Seconds for the spans that are left when the gateway ends."""
_CHAT = ("/chat/completions", "/responses", "/messages", "/messages/count_tokens", "/api/chat")
_NS = 1_000_000_000

logger = logging.getLogger("allspan.gateway")


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request at its end: `reason` is a finish reason or an error's code, `error` then its message."""

    origin: Origin
    request_id: str
    model: str
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    """Seconds from the call's arrival to the first token."""
    timings: RequestTimings | None
    reason: str
    error: str = ""


class Traces:
    """The exporter of requests' spans, in a thread of its own, from a bounded queue."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "allspan")
        self._exporter = exporter
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create({"service.name": name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("allspan.gateway")

    def request(self, ended: EndedRequest) -> None:
        """Exports the span of a request, whose parent is its caller's, and those of its phases."""
        from opentelemetry import trace

        now = time.time_ns()
        began = _epoch_ns(ended.origin, now)
        span = self._tracer.start_span(
            f"{_operation(ended.origin.label)} {ended.model}",
            _parent(ended.origin),
            trace.SpanKind.SERVER,
            _attributes(ended),
            start_time=began,
        )
        if ended.error:
            span.set_status(trace.StatusCode.ERROR, ended.error)
        inside = trace.set_span_in_context(span)
        for name, (start, end) in _phases(ended, began, now).items():
            self._tracer.start_span(name, inside, start_time=start).end(end)
        span.end(now)

    def refused(self, origin: Origin, model: str, code: str, message: str) -> None:
        """Exports the span of a call that was refused before anything of it ran."""
        from opentelemetry import trace

        now = time.time_ns()
        span = self._tracer.start_span(
            f"{_operation(origin.label)} {model}",
            _parent(origin),
            trace.SpanKind.SERVER,
            {"allspan.call": origin.label, "gen_ai.request.model": model, "error.type": code},
            start_time=_epoch_ns(origin, now),
        )
        span.set_status(trace.StatusCode.ERROR, message)
        span.end(now)

    def close(self) -> None:
        """Exports what is left, for FLUSH_S at most: a collector that is gone does not hold up the end."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        self._exporter.shutdown()  # else it would try again for half a minute


def open_traces(endpoint: str, environ: Mapping[str, str] = os.environ) -> Traces | None:
    """The exporter to a collector's URL, None if it is empty. The protocol is that of
    $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, by default gRPC for port 4317 and else HTTP.

    Raises ConfigError for a URL or a protocol that is none, and without the extra `otel`.
    """
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint!r}, must be a URL such as http://localhost:4318/v1/traces"
        )
    protocol = environ.get(PROTOCOL) or (GRPC if endpoint.rstrip("/").endswith(GRPC_PORT) else HTTP)
    if protocol not in (GRPC, HTTP):
        raise ConfigError(f"{PROTOCOL} is {protocol!r}, must be {GRPC} or {HTTP}")
    try:
        exporter = _grpc_exporter(endpoint) if protocol == GRPC else _http_exporter(endpoint)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs the package {error.name!r}, which is missing: {install_command('otel')}"
        ) from error
    logger.info("traces of requests go to %s (%s)", endpoint, protocol)
    return Traces(exporter)


def _grpc_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def _http_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def _parent(origin: Origin) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": origin.traceparent})


def _operation(label: str) -> str:
    return "chat" if label.partition("?")[0].endswith(_CHAT) else "text_completion"


def _epoch_ns(origin: Origin, now: int) -> int:
    """The call's arrival in nanoseconds since 1970; `now` is this moment."""
    return now - int((time.monotonic() - origin.arrived) * _NS)


def _attributes(ended: EndedRequest) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "allspan.call": ended.origin.label,
        "gen_ai.operation.name": _operation(ended.origin.label),
        "gen_ai.provider.name": "allspan",
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
        "gen_ai.usage.output_tokens": ended.num_output_tokens,
    }
    if ended.error:
        attributes["error.type"] = ended.reason
    else:
        attributes["gen_ai.response.finish_reasons"] = [ended.reason]
    if ended.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = ended.ttft_s
    if ended.timings is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = ended.timings.cached_tokens
        attributes["allspan.preemptions"] = ended.timings.preemptions
    return attributes


def _phases(ended: EndedRequest, began: int, now: int) -> dict[str, tuple[int, int]]:
    """The name, begin and end of each phase that the request reached: the gateway's (reading, tokenising, checking),
    the leader's queue, prefill, decode."""
    timings = ended.timings
    if timings is None or not timings.arrived_at:
        return {"gateway": (began, now)}
    arrived = min(max(int(timings.arrived_at * _NS), began), now)
    phases = {"gateway": (began, arrived)}
    marks = [("queue", timings.queue_s), ("prefill", timings.ttft_s), ("decode", timings.total_s)]
    start = arrived
    for name, seconds in marks:
        if not seconds:  # it ended before
            continue
        end = min(max(arrived + int(seconds * _NS), start), now)
        phases[name] = (start, end)
        start = end
    return phases
