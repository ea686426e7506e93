"""/metrics: valid in both formats, true, documented, quick, and there when nothing else is."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from allspan.client.gateway.metrics.table import METRICS, MODEL, PREFIX
from allspan.client.gateway.snapshot_cache import FRESH_S
from allspan.client.gateway.telemetry.histogram import Histogram
from allspan.client.gateway.telemetry.recorder import KEPT_GAPS, Telemetry
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import ERRORS, QueueFull
from allspan.protos.api.results import RequestHandle
from support.gateway import Gateway, eventually, fake_engine, gateway

DOCS = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


async def scrape(server: Gateway) -> dict[str, float]:
    """Samples by name and labels (without the model's), as in `name{a="b"}`."""
    await asyncio.sleep(FRESH_S)
    text = (await server.http.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k != MODEL)
            found[sample.name.removeprefix(PREFIX) + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_the_page_of_metrics_and_the_code_say_the_same() -> None:
    rows = re.findall(r"^\| `allspan:(\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*) \|$", DOCS.read_text(), re.M)
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, _, text in rows}
    assert len(documented) == len(rows), "a metric has two rows"
    assert documented == {metric.name: (metric.kind, metric.labels, metric.help) for metric in METRICS}
    assert not [name for name in re.findall(r"allspan:(\w+)", DOCS.read_text()) if name not in documented]
    told = re.search(r"is the error's code: (.*?)\.\n", DOCS.read_text(), re.S)
    assert told is not None
    assert set(ERRORS) >= set(re.findall(r"`(\w+)`", told[1])) >= {"queue_full", "cancelled", "unavailable"}


async def test_every_metric_is_there_once_and_valid_in_both_formats() -> None:
    async with gateway(fake_engine(step_s=0.001)) as server:
        await server.post("/v1/completions", prompt="abc", max_tokens=5)
        plain = await server.http.get("/metrics")
        opened = await server.http.get("/metrics", headers=OPENMETRICS)
        odd = await server.http.get("/metrics", headers={"Accept": "application/openmetrics-text;version=abc;;q=,"})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert opened.text.endswith("# EOF\n")
    assert odd.status_code == 200
    for families in (list(text_string_to_metric_families(plain.text)), list(openmetrics_families(opened.text))):
        ours = [family for family in families if family.name.startswith(PREFIX)]
        assert len(ours) == len({family.name for family in ours}) == len(METRICS)
        assert all(sample.labels[MODEL] == "tiny" for family in ours for sample in family.samples)
        assert any(family.name.startswith("process_") for family in families)
    kinds = {metric.name.removesuffix("_total"): metric.kind for metric in METRICS if metric.kind == "counter"}
    assert {family.name: family.type for family in openmetrics_families(opened.text)}.items() >= {
        (PREFIX + name, kind) for name, kind in kinds.items()
    }


async def test_what_requests_did_is_what_is_counted() -> None:
    async with gateway(fake_engine(step_s=0.002)) as server:
        await server.post("/v1/completions", prompt="abc", max_tokens=5)
        await server.post("/v1/completions", prompt="abcd", max_tokens=200, n=2)
        await server.post("/v1/completions", prompt="abc", max_tokens=0)
        await server.http.get("/made/up/path")
        await server.http.request("PROPFIND", "/made/up")
        await server.http.get("/v1/models/tiny")
        seen = await scrape(server)
    steps = sum(asked.steps for asked in server.engine.asked.values())
    assert seen['request_success_total{finished_reason="length"}'] == 1
    assert seen['request_success_total{finished_reason="stop"}'] == 2
    assert seen['request_failure_total{reason="invalid_request"}'] == 1
    assert seen["time_to_first_token_seconds_count"] == seen["e2e_request_latency_seconds_count"] == 3
    assert seen["prompt_tokens_total"] == seen["request_prompt_tokens_sum"] == 3 + 4 + 4
    assert seen["generation_tokens_total"] == seen["request_generation_tokens_sum"] == steps
    assert seen["inter_token_latency_seconds_count"] == steps - 3, "a token each after the first"
    assert seen["inter_token_latency_seconds_sum"] == pytest.approx(seen["request_decode_time_seconds_sum"])
    assert 0.002 * (steps - 3) < seen["inter_token_latency_seconds_sum"] < seen["e2e_request_latency_seconds_sum"]
    assert seen["request_prefill_time_seconds_count"] == seen["request_queue_time_seconds_count"] == 3
    assert seen['iteration_tokens_total_count{replica="0"}'] == steps
    assert seen['http_requests_total{handler="/v1/completions",method="POST",status="200"}'] == 2
    assert seen['http_requests_total{handler="/v1/completions",method="POST",status="400"}'] == 1
    assert seen['http_requests_total{handler="/v1/models/{name:path}",method="GET",status="200"}'] == 1
    assert seen['http_requests_total{handler="other",method="GET",status="404"}'] == 1
    assert seen['http_requests_total{handler="other",method="other",status="404"}'] == 1
    assert seen["ready"] == seen['replica_up{replica="0"}'] == 1
    assert seen['prefix_cache_hits_total{replica="0"}'] == 63
    of_layer = {name.split("{")[0]: value for name, value in seen.items() if 'layer="3",replica="0"' in name}
    assert of_layer == {"expert_choices_total": 100, "expert_imbalance": 1.4, "expert_hottest_share": 0.6}


async def test_a_request_that_its_caller_leaves_or_that_fails_counts_once_under_its_reason() -> None:
    async with gateway(fake_engine(step_s=0.002, endless=True)) as server:
        async with server.http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}) as answer:
            await anext(answer.aiter_bytes())
        await eventually(lambda: not server.engine.running)
        await eventually(lambda: server.engine.last.released)
        server.engine.fail_after = 3
        assert (await server.post("/v1/completions", prompt="abc", max_tokens=9)).status_code == 503
        server.engine.refusal = QueueFull("8 requests are waiting")
        assert (await server.post("/v1/completions", prompt="abc", max_tokens=9)).status_code == 429
        seen = await scrape(server)
    failed = {reason: seen[f'request_failure_total{{reason="{reason}"}}'] for reason in ERRORS}
    assert {reason: count for reason, count in failed.items() if count} == {
        "cancelled": 1,
        "unavailable": 1,
        "queue_full": 1,
    }
    assert seen["gateway_requests"] == 0


async def test_a_scrape_answers_soon_while_the_cluster_is_down_or_silent() -> None:
    async with gateway(fake_engine(down_cause="rank 0 (pid 7 on here) died: signal 9")) as server:
        down = await scrape(server)
        assert down["ready"] == down['replica_up{replica="0"}'] == 0
        assert 'num_requests_running{replica="0"}' not in down
        server.engine.down_cause, server.engine.view_s = "", 60.0
        began = time.monotonic()
        silent = await scrape(server)
        assert time.monotonic() - began < 3
    assert silent["ready"] == 1
    assert "time_to_first_token_seconds_count" in silent


def test_a_request_s_record_stays_small_however_many_tokens_it_has() -> None:
    telemetry = Telemetry("tiny")
    record = telemetry.record(Origin("test"), RequestHandle("1", "tiny"), 10)
    for _ in range(KEPT_GAPS + 100):
        record.output(1)
    record.output(0)
    record.output(7)
    assert telemetry.output_tokens == KEPT_GAPS + 107
    assert telemetry.histograms.inter_token_s.count == KEPT_GAPS + 106
    assert len(record._gaps) == KEPT_GAPS


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 6, float("inf")):
        histogram.observe(value)
    assert (histogram.counts, histogram.count) == ([2, 2, 1, 2], 7)
    histogram = Histogram((1, 2))
    histogram.observe(1.5, 4)
    assert (histogram.counts, histogram.total) == ([0, 4, 0], 6.0)
