"""A caller who goes away, by HTTP or gRPC, streaming or not, stops the work within two engine steps."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from allspan.protos import inference_pb2 as pb
from support.gateway import Gateway, eventually, fake_engine, gateway, stub

STEP_S = 0.02


async def assert_all_stopped(server: Gateway, count: int) -> None:
    engine = server.engine
    await eventually(lambda: len(engine.asked) == count and all(a.released for a in engine.asked.values()))
    for asked in engine.asked.values():
        assert asked.stopped
        assert asked.steps - asked.steps_when_stopped <= 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_http_client_that_hangs_up(path: str, stream: bool, n: int) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with gateway(fake_engine(endless=True, step_s=STEP_S)) as server:
        host, port = server.http_address.removeprefix("http://").split(":")
        data = json.dumps(body | {"n": n, "stream": stream, "max_tokens": 200}).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        await eventually(lambda: len(server.engine.asked) == n and all(a.steps for a in server.engine.asked.values()))
        steps = server.engine.last.steps
        writer.close()
        await eventually(lambda: server.engine.last.stopped)
        assert server.engine.last.steps_when_stopped - steps <= 2
        await assert_all_stopped(server, n)
        assert (await server.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200


async def test_http_client_that_hangs_up_before_the_engine_has_said_yes() -> None:
    engine = fake_engine(endless=True, step_s=STEP_S, admission=asyncio.Event())
    async with gateway(engine) as server:
        with pytest.raises(httpx.ReadTimeout):
            await server.http.post("/v1/completions", json={"prompt": "x"}, timeout=httpx.Timeout(30, read=0.05))
        assert engine.admission is not None
        engine.admission.set()
        await eventually(lambda: all(asked.released for asked in engine.asked.values()))
        assert (await server.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200


@pytest.mark.parametrize("how", ["cancel", "deadline", "channel"])
async def test_grpc_caller_that_cancels_expires_or_vanishes(how: str) -> None:
    async with gateway(fake_engine(endless=True, step_s=STEP_S)) as server:
        channel = grpc.aio.insecure_channel(server.grpc_address)
        timeout = 0.3 if how == "deadline" else 30
        call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=timeout)
        first = await call.read()
        assert first.text
        if how == "cancel":
            call.cancel()
        elif how == "channel":
            await channel.close()
        else:
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await assert_all_stopped(server, 1)
        await channel.close()


async def test_a_reader_that_is_slow_gets_everything_in_fewer_chunks() -> None:
    async with (
        gateway(fake_engine(tokens=tuple(b"y" * 200))) as server,
        server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 250, "stream": True}
        ) as response,
    ):
        await eventually(lambda: not server.engine.running)
        text = "".join([part async for part in response.aiter_text()])
    payloads = [json.loads(line[6:]) for line in text.split("\n\n") if line and not line.endswith("[DONE]")]
    assert "".join(payload["choices"][0]["text"] for payload in payloads) == "y" * 200


async def test_a_caller_that_is_cancelled_while_its_request_is_being_stopped() -> None:
    """A stop string has ended the text; the engine, which goes on until it hears so, must hear it in any case."""
    engine = fake_engine(endless=True, step_s=STEP_S, stop_s=0.2)
    async with gateway(engine) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(stop=["quick"]))
        call = stub(channel).Generate(request, timeout=10)
        assert [response.finish_reason async for response in _until_end(call)][-1] == "stop"
        call.cancel()
        await assert_all_stopped(server, 1)


async def _until_end(call: grpc.aio.UnaryStreamCall[Any, Any]) -> AsyncIterator[pb.GenerateResponse]:
    async for response in call:
        yield response
        if response.finish_reason:
            return


def posted(**fields: object) -> bytes:
    """A request for a completion as it is sent."""
    body = json.dumps({"prompt": "x"} | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_later_request_of_a_kept_connection_stops_when_its_client_hangs_up(stream: bool) -> None:
    engine = fake_engine(endless=True, step_s=STEP_S)
    async with gateway(engine) as server:
        host, port = server.http_address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for max_tokens in (2, 200):
            writer.write(posted(max_tokens=max_tokens, stream=stream and max_tokens > 2))
            if max_tokens == 2:
                length = int((await reader.readuntil(b"\r\n\r\n")).split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
        await eventually(lambda: len(engine.asked) == 2 and engine.last.steps)
        steps = engine.last.steps
        writer.close()
        await eventually(lambda: engine.last.released)
        assert engine.last.stopped
        assert engine.last.steps_when_stopped - steps <= 2
        assert engine.last.steps - engine.last.steps_when_stopped <= 2


@pytest.mark.parametrize("how", ["http", "grpc", "deadline"])
async def test_a_request_that_still_waits_for_its_first_token_is_stopped_as_well(how: str) -> None:
    engine = fake_engine(endless=True, step_s=0.4)
    async with gateway(engine) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        if how == "http":
            asking = asyncio.create_task(server.post("/v1/completions", prompt="x", n=3))
        else:
            timeout = 0.1 if how == "deadline" else 30
            call = stub(channel).Generate(pb.GenerateRequest(text="x", n=3), timeout=timeout)
        await eventually(lambda: len(engine.asked) == 3)
        if how == "http":
            asking.cancel()
        elif how == "grpc":
            call.cancel()
        await eventually(lambda: all(asked.stopped for asked in engine.asked.values()), 0.35)
        assert all(asked.steps == 0 for asked in engine.asked.values())
        await assert_all_stopped(server, 3)


async def test_five_hundred_random_cancels_leave_nothing_running() -> None:
    """Streaming or not, one choice or more, over HTTP and gRPC, at any moment: also before the engine has said yes."""
    engine = fake_engine(endless=True, step_s=0.002)
    chosen = random.Random(7)
    async with gateway(engine) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        host, port = server.http_address.removeprefix("http://").split(":")

        async def over_http(stream: bool, n: int, after_s: float) -> None:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(posted(n=n, stream=stream, max_tokens=200))
            await asyncio.sleep(after_s)
            writer.close()

        async def over_grpc(n: int, after_s: float) -> None:
            call = stub(channel).Generate(pb.GenerateRequest(text="x", n=n))
            await asyncio.sleep(after_s)
            call.cancel()

        for _ in range(20):
            callers = []
            for _ in range(25):
                n, after_s = chosen.randint(1, 3), chosen.choice((0.0, chosen.random() * 0.03))
                stream = chosen.random() < 0.5
                callers.append(over_grpc(n, after_s) if chosen.random() < 0.3 else over_http(stream, n, after_s))
            await asyncio.gather(*callers)
        await eventually(lambda: all(asked.released for asked in engine.asked.values()), 10)
        assert len(engine.asked) > 300
        for asked in engine.asked.values():
            assert asked.stopped
            assert asked.steps - asked.steps_when_stopped <= 2
        await eventually(lambda: not engine.running)
        assert (await server.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200
