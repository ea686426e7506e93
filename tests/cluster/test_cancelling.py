"""A thousand requests that are given up at any moment, on a real rank: no page is left, and the work has stopped."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from allspan import ClientEngine
from allspan.protos import inference_pb2 as pb
from allspan.protos import inference_pb2_grpc
from allspan.protos.api.engine import EngineStatistics
from support.serving import Served, runtime_folder

CANCELS = int(os.environ.get("ALLSPAN_CANCELS", "1000"))
"""More by hand: ALLSPAN_CANCELS=100000 pytest tests/cluster/test_cancelling.py --timeout 7200"""
AT_ONCE = 25
KEY = {"ALLSPAN_ADMIN_API_KEY": "sk-admin-0123456789"}


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    with runtime_folder() as runtime:
        server = Served(tiny, "--ranks=1", "--threads=1", "--max-num-seqs=16", runtime=runtime, env=KEY)
        try:
            yield server.wait_ready()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[ClientEngine]:
    with ClientEngine(attach=served.run_dir) as attached:
        yield attached


def settled(engine: ClientEngine, within: float = 60.0) -> EngineStatistics:
    """When nothing runs or waits any more."""
    deadline = time.monotonic() + within
    while (counted := engine.statistics()).running or counted.waiting:
        assert time.monotonic() < deadline, counted
        time.sleep(0.02)
    return counted


def posted(**fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def give_up(served: Served, channel: grpc.aio.Channel, chosen: random.Random) -> None:
    """One request, whose caller leaves before or while it runs, or waits for its deadline."""
    prompt = "".join(chosen.choices("abcdefgh ", k=chosen.choice((1, 30, 300))))
    n, after_s = chosen.randint(1, 3), chosen.choice((0.0, chosen.random() * 0.2))
    if chosen.random() < 0.3:
        request = pb.GenerateRequest(text=prompt, n=n, sampling=pb.SamplingOptions(max_tokens=2000, ignore_eos=True))
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request, timeout=after_s + 0.01 if chosen.random() < 0.3 else None)
        await asyncio.sleep(after_s)
        call.cancel()
        return
    host, port = served.http.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    fields = {"prompt": prompt, "n": n, "stream": chosen.random() < 0.5, "max_tokens": 2000, "ignore_eos": True}
    if chosen.random() < 0.2:
        fields["timeout_s"] = after_s + 0.001
    writer.write(posted(**fields))
    await asyncio.sleep(after_s)
    writer.close()


@pytest.mark.timeout(max(240, CANCELS // 10))
def test_random_cancels_leave_no_page_behind(served: Served, engine: ClientEngine) -> None:
    before = settled(engine)
    chosen = random.Random(7)

    async def everybody() -> None:
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            for _ in range(CANCELS // AT_ONCE):
                await asyncio.gather(*(give_up(served, channel, chosen) for _ in range(AT_ONCE)))

    asyncio.run(everybody())
    after = settled(engine)
    assert (before.pages_used, after.pages_used) == (0, 0)
    assert after.pages_free + after.pages_cached == after.pages_total
    ended = after.finished_requests - before.finished_requests
    assert ended > CANCELS // 2
    assert after.steps > before.steps
    assert engine.generate("abc")[0].token_ids


def test_the_work_of_one_that_left_stops_within_two_steps(served: Served, engine: ClientEngine) -> None:
    """By the engine's own count of steps: with nothing else to do it makes none."""
    settled(engine)

    async def leave() -> None:
        host, port = served.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(posted(prompt="x", max_tokens=4000, ignore_eos=True, stream=True))
        await reader.readuntil(b"data: ")
        writer.close()

    asyncio.run(leave())
    steps = settled(engine, 5.0).steps
    time.sleep(0.3)
    assert engine.statistics().steps - steps <= 2


def test_the_admin_puts_it_to_sleep_wakes_it_and_looks_at_its_work(served: Served, engine: ClientEngine) -> None:
    settled(engine)
    headers = {"Authorization": f"Bearer {KEY['ALLSPAN_ADMIN_API_KEY']}"}
    environment = Path(f"/proc/{served.process.pid}/environ").read_bytes()
    environment += Path(f"/proc/{served.rank_pid(0)}/environ").read_bytes()
    assert b"sk-admin" not in environment
    with httpx.Client(base_url=served.http, headers=headers, timeout=60, trust_env=False) as http:

        def operate(path: str) -> dict[str, str]:
            answer = http.post(path)
            assert answer.status_code == 200, answer.text
            told: dict[str, str] = answer.json()
            return told

        def ask() -> int:
            return http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}).status_code

        operate("/start_profile")
        assert ask() == 200
        assert http.get("/profile").json()["ops"]
        operate("/stop_profile")
        operate("/reset_prefix_cache")
        assert engine.statistics().pages_cached == 0
        assert operate("/pause") == {"status": "paused"}
        assert (http.get("/ready").status_code, ask()) == (503, 503)
        assert operate("/resume") == {"status": "running"}
        assert ask() == 200
        assert operate("/sleep") == {"status": "sleeping"}
        assert not engine.statistics().weights_loaded
        assert (http.get("/health").status_code, http.get("/ready").status_code, ask()) == (200, 503, 503)
        assert http.post("/resume").status_code == 503  # the weights are not there
        assert operate("/wake_up") == {"status": "running"}
        assert engine.statistics().weights_loaded
        assert (http.get("/ready").status_code, ask()) == (200, 200)
