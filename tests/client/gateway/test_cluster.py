"""GET /cluster tells what there is to know, quickly, whether the cluster is up, slow or down."""

from __future__ import annotations

import asyncio
import time

from allspan.client.gateway.snapshot_cache import FRESH_S
from support.gateway import eventually, fake_engine, gateway


async def test_the_live_cluster_is_one_object() -> None:
    async with gateway(fake_engine(step_s=0.001)) as server:
        await server.post("/v1/completions", prompt="abc", max_tokens=5)
        await asyncio.sleep(FRESH_S)
        told = (await server.http.get("/cluster")).json()
    assert (told["model"], told["max_model_len"], told["ready"], told["cause"]) == ("tiny", 256, True, "")
    assert told["uptime_s"] > 0
    assert told["replicas"] == {"total": 1, "ready": 1}
    (rank,) = told["ranks"]
    known = {name: rank[name] for name in ("replica", "rank", "pid", "host", "where", "state", "heard_s", "rss_bytes")}
    assert known == {
        "replica": 0,
        "rank": 0,
        "pid": 7,
        "host": "here",
        "where": "NUMA node 0",
        "state": "running",
        "heard_s": 0.1,
        "rss_bytes": 1000,
    }
    assert (told["running"], told["waiting"]) == (0, 0)
    assert told["kv"]["pages_total"] == 64
    assert told["kv"]["bytes"] == 500
    assert told["prefix"] == {"queries": 100, "hits": 63}
    assert told["tokens_per_s"] == {"prompt": 1203.0, "generation": 845.0}
    assert told["totals"]["generated_tokens"] == 5
    load = {"layer": 3, "imbalance": 1.4, "hottest": 1, "hottest_share": 0.6, "tokens": [10, 60, 30, 0]}
    assert told["experts"] == [load]


async def test_a_cluster_that_is_down_is_told_with_its_cause_and_without_counts() -> None:
    async with gateway(fake_engine(down_cause="rank 1 (pid 7 on here) died: signal 9")) as server:
        answer = await server.http.get("/cluster")
    told = answer.json()
    assert answer.status_code == 200
    assert (told["ready"], told["cause"]) == (False, "rank 1 (pid 7 on here) died: signal 9")
    assert told["ranks"][0]["state"] == "gone"
    assert "running" not in told


async def test_concurrent_readers_ask_the_ranks_once_and_do_not_wait_for_a_slow_answer() -> None:
    async with gateway(fake_engine(view_s=60.0)) as server:
        began = time.monotonic()
        answers = await asyncio.gather(*(server.http.get("/cluster") for _ in range(20)))
        assert time.monotonic() - began < 3
        assert {answer.status_code for answer in answers} == {200}
        assert server.engine.looks == 1
        server.engine.view_s = 0.0
        await asyncio.sleep(FRESH_S)
        assert (await server.http.get("/cluster")).json()["running"] == 0
        await eventually(lambda: server.engine.looks == 2)
