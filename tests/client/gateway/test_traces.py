"""Spans of requests, as a collector gets them over OTLP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from allspan.client.gateway.telemetry import traces
from allspan.client.gateway.telemetry.traces import open_traces
from allspan.protos.api.errors import ConfigError, Unavailable
from support.gateway import fake_engine, gateway

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *words: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        found[entry.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


async def test_a_request_s_span_is_its_caller_s_child_and_the_parent_of_its_phases(collector: Collector) -> None:
    async with gateway(fake_engine(step_s=0.002), otlp_traces_endpoint=collector.url) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5}
        answer = (await server.http.post("/v1/chat/completions", json=body, headers=headers)).json()
    spans = {span.name: span for span in collector.spans}
    whole = spans.pop("chat tiny")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    told = attributes(whole)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 5
    assert list(spans) == ["gateway", "queue", "prefill", "decode"]
    ends = whole.start_time_unix_nano
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert span.start_time_unix_nano == ends, "phases follow each other"
        ends = span.end_time_unix_nano
    assert ends <= whole.end_time_unix_nano
    assert "secret" not in str(collector.spans)


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_a_call_that_is_refused_or_fails_has_a_span_with_its_error(collector: Collector, max_tokens: int) -> None:
    engine = fake_engine(fail_after=2, failure=Unavailable("rank 1 died"))
    async with gateway(engine, otlp_traces_endpoint=collector.url) as server:
        await server.post("/v1/completions", prompt="abc", max_tokens=max_tokens)
    (span,) = [span for span in collector.spans if span.name == "text_completion tiny"]
    assert span.status.code == 2
    error, message = ("unavailable", "rank 1 died") if max_tokens else ("invalid_request", "max_tokens is 0")
    assert attributes(span)["error.type"] == error
    assert message in span.status.message


async def test_a_collector_that_is_gone_harms_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "FLUSH_S", 0.2)
    async with gateway(fake_engine(), otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert (await server.post("/v1/completions", prompt="abc", max_tokens=2)).status_code == 200


def test_an_endpoint_or_a_protocol_that_is_none_is_refused() -> None:
    assert open_traces("") is None
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint is 'localhost:4318', must be a URL such as"):
        open_traces("localhost:4318")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'thrift', must be grpc or http"):
        open_traces("http://localhost:4318", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "thrift"})
