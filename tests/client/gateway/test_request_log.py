"""One line a request, whole and without its text; one each ten seconds about all of them."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from allspan.client.gateway.snapshot_cache import SnapshotCache
from allspan.client.gateway.telemetry.request_context import Origin, traceparent
from allspan.client.gateway.telemetry.status_line import StatusLine, status
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import Unavailable
from allspan.protos.cluster.logs import REQUESTS
from support.gateway import fake_engine, gateway, stub

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == REQUESTS]


async def test_the_line_of_a_request_names_its_caller_s_id_and_trace_and_all_its_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    headers = {"X-Request-Id": "mine-7", "traceparent": TRACEPARENT}
    async with gateway(fake_engine(step_s=0.002)) as server:
        body = {"prompt": "a secret prompt", "max_tokens": 5}
        await server.http.post("/v1/completions", json=body, headers=headers)
    (record,) = lines(caplog)
    said = record.getMessage()
    assert said.startswith("finished POST /v1/completions ")
    assert f", model tiny, request id mine-7, trace {TRACE}, reason length" in said
    assert "secret" not in caplog.text
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == (15, 2, 5)
    assert 0.002 <= fields["itl_p50_s"] <= fields["ttft_s"] + fields["total_s"]
    assert fields["trace"] == TRACE


async def test_a_call_over_grpc_is_told_by_the_same_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with gateway(fake_engine()) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        options = pb.SamplingOptions(max_tokens=3)
        request = pb.GenerateRequest(request_id="mine-8", text="abc", sampling=options)
        async for _ in stub(channel).Generate(request, metadata=(("traceparent", TRACEPARENT),)):
            pass
    (record,) = lines(caplog)
    assert record.getMessage().endswith(f"request id mine-8, trace {TRACE}, reason length")


async def test_a_request_that_fails_has_one_line_at_warning_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = fake_engine(fail_after=2, failure=Unavailable("rank 1 (pid 7 on here) died: signal 9"))
    async with gateway(engine) as server:
        assert (await server.post("/v1/completions", prompt="abc", max_tokens=9)).status_code == 503
        async with server.http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}) as answer:
            await answer.aread()
    whole, streamed = lines(caplog)
    for record in (whole, streamed):
        assert record.levelname == "WARNING"
        assert record.getMessage().startswith("failed POST /v1/completions ")
        assert record.getMessage().endswith("reason unavailable: rank 1 (pid 7 on here) died: signal 9")


@pytest.mark.parametrize(
    "header",
    ["", "x", TRACEPARENT.upper(), f"00-{'0' * 32}-00f067aa0ba902b7-01", TRACEPARENT[:-3], TRACEPARENT + "\nforged"],
)
def test_what_is_no_traceparent_is_passed_over(header: str) -> None:
    assert traceparent({"traceparent": header}) == ""


def test_a_later_version_of_traceparent_is_understood() -> None:
    assert Origin("call", traceparent=traceparent({"traceparent": f"01{TRACEPARENT[2:]}-more"})).trace_id == TRACE


async def test_the_status_line_comes_while_there_is_work_and_not_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "allspan.gateway")
    engine = fake_engine()
    follow = asyncio.create_task(StatusLine(SnapshotCache(engine), period_s=0.3).follow())  # type: ignore[arg-type]
    await asyncio.sleep(1.0)
    follow.cancel()
    assert not caplog.records, "nothing runs"


def test_the_status_line_has_rates_of_its_own_ten_seconds() -> None:
    before = fake_engine().counted()
    values = {name: getattr(before, name) for name in before.__slots__}
    values |= {"running": 12, "waiting": 3, "fullest_pages_total": 1000, "fullest_pages_used": 412}
    values |= {"prompt_tokens": 12_030, "generated_tokens": 8_450}
    values |= {"prefix_query_tokens": 200, "prefix_hit_tokens": 126}
    now = type(before)(**values)
    line = "running: 12 reqs, waiting: 3, KV 41.2 %, prefix hit 63 %, prompt 1,203 tok/s, gen 845 tok/s"
    assert status(before, now, 10.0) == line
    assert status(now, before, 10.0) == "", "another world counts from zero"
    assert "prefix hit -" in status(now, now, 10.0)
