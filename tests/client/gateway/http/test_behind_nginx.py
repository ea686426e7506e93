"""Behind a real nginx, with the site of deploy/: streams come as they are made, and who goes away stops the work."""

from __future__ import annotations

import asyncio
import json
import time

import grpc
import httpx
import pytest

from allspan.protos import inference_pb2 as pb
from support.gateway import Gateway, eventually, fake_engine, gateway, stub
from support.nginx import nginx

STEP_S = 0.02
COMPLETIONS = "/v1/completions"


async def ask(port: int, stream: bool, n: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": stream, "n": n}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    return writer


async def assert_stops(server: Gateway, before: int, steps: int) -> None:
    """Within two steps of the engine from where it was when its caller left."""
    asked = list(server.engine.asked.values())[before:]
    await eventually(lambda: all(request.released for request in asked))
    for request in asked:
        assert request.stopped
        assert request.steps_when_stopped - steps <= 2
        assert request.steps - request.steps_when_stopped <= 2


@pytest.mark.parametrize("buffering", [False, True])
async def test_a_client_that_hangs_up_on_nginx_stops_the_work(buffering: bool) -> None:
    async with (
        gateway(fake_engine(endless=True, step_s=STEP_S)) as server,
        nginx(server.http_address, server.grpc_address, buffering) as proxy,
    ):
        for stream, n in ((True, 1), (False, 1), (True, 3), (False, 3)):
            before = len(server.engine.asked)
            writer = await ask(proxy.http, stream, n)
            await eventually(lambda before=before, n=n: len(server.engine.asked) == before + n)  # type: ignore[misc]
            await eventually(lambda: server.engine.last.steps > 2)
            writer.close()
            await assert_stops(server, before, server.engine.last.steps)


async def test_a_grpc_caller_that_cancels_or_expires_behind_nginx_stops_the_work() -> None:
    async with (
        gateway(fake_engine(endless=True, step_s=STEP_S)) as server,
        nginx(server.http_address, server.grpc_address) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.grpc}") as channel,
    ):
        for timeout in (30, 0.3):
            before = len(server.engine.asked)
            call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=timeout)
            assert (await call.read()).text
            if timeout == 30:
                call.cancel()
            else:
                assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await assert_stops(server, before, server.engine.last.steps)


@pytest.mark.parametrize("buffering", [False, True])
async def test_tokens_pass_as_they_come_and_errors_and_names_as_they_are(buffering: bool) -> None:
    async with (
        gateway(fake_engine(endless=True, step_s=0.05)) as server,
        nginx(server.http_address, server.grpc_address, buffering) as proxy,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.http}", trust_env=False, timeout=10) as http,
    ):
        body = {"prompt": "x", "max_tokens": 20, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body, headers={"X-Request-Id": "mine"}) as response:
            assert response.headers["x-request-id"] == "mine"
            came = [time.monotonic() async for _ in response.aiter_text()]
        assert came[-1] - came[0] > 0.5
        refused = await http.post(COMPLETIONS, json={"prompt": "x", "n": 99})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        for _ in range(3):  # over connections that nginx keeps
            assert (await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).status_code == 200
