"""Clients that are slow, silent, many or deaf: each is cut off in its time, and nobody else notices."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn
from unittest.mock import Mock

import pytest

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.server.connections import Connections
from allspan.client.gateway.server.listener import Listener
from support.gateway import Gateway, eventually, fake_engine, gateway

COMPLETIONS = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Client:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def rest(self, timeout: float = 5.0) -> bytes:
        """Everything until the server hangs up."""
        try:
            return await asyncio.wait_for(self.reader.read(), timeout)
        except ConnectionResetError:
            return b""

    async def answer(self) -> bytes:
        """One answer with a length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await self.reader.readexactly(length)


@asynccontextmanager
async def connected(server: Gateway, first: bytes = b"") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(*address(server))
    writer.write(first)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def address(server: Gateway) -> tuple[str, int]:
    host, port = server.http_address.removeprefix("http://").split(":")
    return host, int(port)


def error_of(answer: bytes) -> tuple[int, str]:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["message"]


async def test_headers_that_drip_are_cut_off_however_steadily_they_do() -> None:
    async with gateway(header_timeout=0.3) as server, connected(server, HEAD) as slow:
        started = time.monotonic()

        async def drip() -> None:
            while True:
                slow.writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        answer = await slow.rest()  # a drop after the end may cost it the answer, as TCP has it
        assert answer == b"" or error_of(answer) == (408, "the headers did not arrive within 0.3 s")
        dripping.cancel()
        assert 0.25 < time.monotonic() - started < 5


@pytest.mark.parametrize("first", [b"", b"\r\n\r\n", GET])
async def test_silence_before_a_request_or_blank_lines_for_one_end_the_connection(first: bytes) -> None:
    async with gateway(header_timeout=0.2, keep_alive_timeout=1) as server, connected(server, first) as client:
        if first == GET:
            assert b" 200 " in await client.answer()
            for _ in range(3):  # would put off the end of an idle connection for ever
                client.writer.write(b"\r\n")
                await asyncio.sleep(0.05)
        left = await client.rest(2)
        assert left == b"" if not first else error_of(left)[0] == 408


async def test_a_second_request_on_a_connection_has_the_same_time_for_its_headers() -> None:
    async with gateway(header_timeout=0.2) as server, connected(server, GET) as client:
        await client.answer()
        client.writer.write(HEAD)
        assert error_of(await client.rest())[0] == 408


async def test_headers_that_are_too_large_are_refused_before_they_are_all_there() -> None:
    async with gateway(max_header_bytes=2048) as server:
        for name in (b"X-A: %s\r\n" % (b"b" * 4000), b"X-A: b\r\n" * 600, b"X-A: %s" % (b"b" * 9000)):
            async with connected(server, HEAD + name) as client:
                assert error_of(await client.rest()) == (431, "the headers are larger than 2048 bytes")
        async with connected(server, b"GET /" + b"a" * 9000) as client:
            assert error_of(await client.rest())[0] == 431


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nA\r\n\r\n"]
)
async def test_what_is_no_http_gets_openais_body_and_one_line(noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with gateway() as server, connected(server, noise) as client:
        assert error_of(await client.rest())[0] == 400
        assert [r.getMessage() for r in caplog.records if "400" in r.getMessage()] == [
            "refused a connection with 400: this is no valid HTTP/1.1 request"
        ]


async def test_an_upgrade_that_is_asked_for_is_passed_over_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for kind in (b"websocket", b"h2c"):
        asked = GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: " + kind + b"\r\n\r\n")
        async with gateway() as server, connected(server, asked) as client:
            caplog.clear()
            assert b" 200 " in await client.answer()
            assert caplog.records == []


class Forbidden(socket.socket):
    """A listening socket that a firewall keeps from accepting."""

    tries = 0

    def accept(self) -> NoReturn:
        self.tries += 1
        raise PermissionError(errno.EPERM, "Operation not permitted")


async def test_an_accept_that_fails_is_told_and_tried_again_after_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    with Forbidden() as sock, socket.socket() as client:
        sock.bind(("127.0.0.1", 0))
        listener = Listener(sock, Connections(LimitsConfig()), Mock(), None)
        listener.start()
        client.connect(sock.getsockname())
        await asyncio.sleep(0.05)
        listener.close()
        assert sock.tries == 1
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be accepted for 0.5 s: Operation not permitted"
    ]


async def test_a_refused_body_that_never_comes_does_not_hold_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allspan.client.gateway.server.protocol.BODY_MARGIN_S", 0.1)
    async with gateway(api_key=("k",), body_timeout=0.1) as server:
        server_side = time.monotonic()
        async with connected(server, HEAD + b"Content-Length: 1000\r\n\r\n") as client:
            assert b" 401 " in await client.answer()
            assert await client.rest(9) == b""
        assert time.monotonic() - server_side < 8


async def test_idle_connections_make_room_and_working_ones_stay() -> None:
    engine = fake_engine(endless=True, step_s=0.01)
    async with gateway(engine, max_connections=8, max_concurrent_requests=4) as server:
        streaming = asyncio.create_task(server.post(COMPLETIONS, prompt="x", max_tokens=100))
        await eventually(lambda: engine.asked)
        idle = [await asyncio.open_connection(*address(server)) for _ in range(40)]
        gone = [asyncio.create_task(reader.read()) for reader, _ in idle]
        await eventually(lambda: sum(task.done() for task in gone) >= 32)
        async with connected(server, GET) as client:
            assert b" 200 " in await client.answer()
        assert (await streaming).json()["usage"]["completion_tokens"] == 100
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*gone)


async def test_with_every_connection_at_work_a_new_one_is_told_so() -> None:
    engine = fake_engine(endless=True, step_s=0.01)
    async with gateway(engine, max_connections=2) as server:
        body = b'{"prompt":"x","max_tokens":200}'
        ask = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        async with connected(server, ask), connected(server, ask):
            await eventually(lambda: len(engine.asked) == 2)
            async with connected(server, GET) as third:
                status, message = error_of(await third.rest())
                assert (status, "no room" in message) == (503, True)
        await eventually(lambda: all(asked.released for asked in engine.asked.values()))
        assert (await server.post(COMPLETIONS, prompt="x", max_tokens=1)).status_code == 200


async def test_a_reader_that_takes_nothing_is_cancelled_and_others_stream_on() -> None:
    """Its answer is larger than what the sockets hold, so the server must wait for it."""
    text = "y" * 400
    engine = fake_engine(tokens=tuple(text.encode()), endless=True, max_model_len=1 << 20)
    async with gateway(engine, write_timeout=0.5) as server:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, address(server))
        body = json.dumps({"prompt": "x", "max_tokens": 1_000_000, "stream": True, "logprobs": 1}).encode()
        await loop.sock_sendall(deaf, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: engine.asked)
        asked = engine.last
        beside = await server.post(COMPLETIONS, prompt="z", max_tokens=50)
        assert beside.json()["usage"]["completion_tokens"] == 50
        await eventually(lambda: asked.released, 10)
        assert asked.stopped
        assert asked.steps - asked.steps_when_stopped <= 2
        deaf.close()


async def test_a_thousand_idle_connections_cost_a_request_nothing_it_would_notice() -> None:
    async with gateway() as server:
        idle = []
        for _ in range(1000):
            idle.append(await asyncio.open_connection(*address(server)))
        started = time.monotonic()
        assert (await server.post(COMPLETIONS, prompt="x", max_tokens=20)).status_code == 200
        assert time.monotonic() - started < 2
        for _, writer in idle:
            writer.close()
