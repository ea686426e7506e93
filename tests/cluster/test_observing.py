"""What a real cluster tells of itself: its log, its metrics, its live view, and a readiness that cannot lie."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from allspan import ClientEngine, SamplingParams
from allspan.client.gateway.snapshot_cache import FRESH_S
from support.serving import Served, runtime_folder
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    with runtime_folder() as runtime:
        flags = ("--ranks=2", "--threads=1", "--oversubscribe", "--no-restart", "--log-format=json")
        server = Served(tiny, *flags, runtime=runtime)
        try:
            yield server.wait_ready()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.http, timeout=30, trust_env=False) as client:
        yield client


def samples(http: httpx.Client) -> dict[str, float]:
    """Sums of the samples of each name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def seconds_until(condition: Callable[[], object], limit: float = 10.0) -> float:
    began = time.monotonic()
    wait_until(condition, limit, "it to become true")
    return time.monotonic() - began


def is_ready(http: httpx.Client) -> bool:
    return http.get("/ready").status_code == 200


def test_ranks_and_steps_are_seen_as_they_are(served: Served, http: httpx.Client) -> None:
    before = samples(http)
    body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
    time.sleep(2 * FRESH_S)
    told = http.get("/cluster").json()
    assert (told["ready"], told["replicas"], told["running"]) == (True, {"total": 1, "ready": 1}, 0)
    assert [rank["pid"] for rank in told["ranks"]] == [served.rank_pid(0), served.rank_pid(1)]
    for rank in told["ranks"]:
        assert (rank["state"], rank["threads"], rank["device"]) == ("running", 1, "")
        assert 0 <= rank["heard_s"] < 1.5
        assert 0 < rank["rss_bytes"] < 1.05 * rank["peak_rss_bytes"], "the kernel counts them a little apart"
        assert rank["steps"] >= 8
        assert rank["where"]
    now = samples(http)
    grown = {name: now[name] - before[name] for name in before}
    assert grown["allspan:generation_tokens_total"] == 8
    assert grown["allspan:iteration_tokens_total_count"] == 8
    assert grown["allspan:iteration_tokens_total_sum"] == 3 + 7, "the prompt, then a token a step"
    assert grown["allspan:rank_step_seconds_count"] >= 2 * 8
    assert 0 < grown["allspan:scheduler_step_overhead_seconds_sum"] < grown["allspan:rank_step_seconds_sum"]
    assert now["allspan:rank_resident_memory_bytes"] > 2 * 10 * 2**20
    assert now["allspan:cache_config_info"] == 1


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening(pid: int) -> set[tuple[str, str, int]]:
    """The program, address and port of every TCP socket that a process or one of its descendants listens on."""
    found = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((process.name(), connection.laddr.ip, connection.laddr.port))
    return found


def test_nothing_but_the_two_ports_listens_except_the_launcher_on_loopback(served: Served) -> None:
    found = listening(served.process.pid)
    assert {address for _, address, _ in found} <= LOOPBACK
    documented = {int(address.rpartition(":")[2]) for address in (served.http, served.grpc)}
    assert {port for program, _, port in found if program not in ("mpirun", "prterun", "orterun")} == documented


def test_every_line_of_the_log_is_an_object(served: Served) -> None:
    told: list[dict[str, Any]] = [json.loads(line) for line in served.log.splitlines()]
    assert {line["source"] for line in told} >= {"launcher", "gateway", "rank 0", "rank 1"}
    first = told[0]["message"]
    assert first.startswith("allspan 0.")
    assert "log_format='json', oversubscribe=True, " in first
    assert any("KV cache size: " in line["message"] and "x" in line["message"] for line in told)
    (ended,) = [line for line in told if line["message"].startswith("finished ")]
    assert (ended["trace"], ended["output_tokens"], ended["reason"]) == (TRACE, 8, "length")
    assert all("T" in line["time"] and line["time"][-6] in "+-" for line in told)


def test_a_stopped_model_is_not_ready_and_says_so(served: Served, http: httpx.Client) -> None:
    with ClientEngine(attach=served.run_dir) as engine:
        engine.stop_model()
        assert seconds_until(lambda: not is_ready(http)) < 2
        refusal = http.get("/ready")
        assert refusal.status_code == 503
        assert "stopped" in refusal.json()["error"]["message"]
        assert samples(http)["allspan:ready"] == 0
        wait_until(
            lambda: "stopped" in {rank["state"] for rank in http.get("/cluster").json()["ranks"]}, 5, "a stopped rank"
        )
        engine.unload_weights()
        wait_until(lambda: samples(http)["allspan:weights_loaded"] == 0, 5, "the view to be renewed")
        engine.reload_weights()
        assert not is_ready(http), "loaded, and stopped still"
        engine.start_model()
        assert seconds_until(lambda: is_ready(http)) < 2
        assert engine.generate([[1, 2]], SamplingParams(max_tokens=2))


def test_the_death_of_a_rank_is_seen_within_two_seconds(served: Served, http: httpx.Client) -> None:
    """The last one of this file: its cluster is not restarted."""
    os.kill(served.rank_pid(1), signal.SIGKILL)
    died = time.monotonic()

    def ready() -> bool:
        try:
            return is_ready(http)
        except httpx.TransportError:
            return False  # the server has ended altogether

    wait_until(lambda: not ready(), 10, "the answer to turn")
    assert time.monotonic() - died < 2
    for path, wanted in (("/health", 200), ("/metrics", 200), ("/cluster", 200), ("/ready", 503)):
        try:
            assert http.get(path).status_code == wanted, path
        except httpx.TransportError:
            break
    assert served.wait_exit(20) != 0
    for line in served.log.splitlines():
        json.loads(line)
