"""Keepalive and age of gRPC's connections, seen from below (HTTP/2 frames on a socket); who may end whose request."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from allspan.protos import inference_pb2 as pb
from support.gateway import Gateway, eventually, fake_engine, gateway, stub

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7


def frame(kind: int, data: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes((kind, flags)) + bytes(4) + data


class Frames:
    """What a server sends on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def ping(self) -> None:
        self._writer.write(frame(PING, bytes(8)))

    async def next(self) -> tuple[int, int, bytes]:
        """Kind, flags and payload; kind -1 when the connection ends."""
        try:
            head = await self._reader.readexactly(9)
            return head[3], head[4], await self._reader.readexactly(int.from_bytes(head[:3]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return -1, 0, b""

    async def until(self, kind: int) -> bytes:
        async with asyncio.timeout(5):
            while (found := await self.next())[0] != kind:
                assert found[0] != -1, "the connection ended"
            return found[2]


@asynccontextmanager
async def connection(server: Gateway) -> AsyncIterator[Frames]:
    host, port = server.grpc_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(PREFACE + frame(SETTINGS))
        frames = Frames(reader, writer)
        await frames.until(SETTINGS)
        yield frames
    finally:
        writer.close()


async def test_pings_beyond_the_allowed_interval_end_the_connection() -> None:
    async with gateway() as server, connection(server) as frames:
        for _ in range(10):
            frames.ping()
            kind, _, _ = await asyncio.wait_for(frames.next(), 5)
            if kind in (GOAWAY, -1):
                return
    raise AssertionError("ten pings in a row were answered")


async def test_pings_within_the_allowed_interval_are_answered() -> None:
    async with gateway(grpc_min_ping_interval=0.02) as server, connection(server) as frames:
        for _ in range(10):
            await asyncio.sleep(0.05)
            frames.ping()
            await frames.until(PING)


async def test_a_silent_client_is_asked_whether_it_is_there() -> None:
    async with gateway(grpc_keepalive_time=1.0) as server, connection(server) as frames:
        await frames.until(PING)


async def test_an_old_connection_is_asked_to_go_and_its_streams_go_on() -> None:
    engine = fake_engine(endless=True, step_s=0.02)
    async with (
        gateway(engine, grpc_max_connection_age=0.3) as server,
        connection(server) as frames,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=20)
        assert await call.read()
        await frames.until(GOAWAY)
        await asyncio.sleep(0.3)
        for _ in range(5):
            assert await call.read() is not grpc.aio.EOF
        call.cancel()


async def test_a_key_ends_its_own_requests_and_nobody_elses() -> None:
    def bearer(key: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {key}"),)

    async def end(call: grpc.aio.UnaryStreamCall[Any, Any]) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        return await call.code()

    engine = fake_engine(endless=True, step_s=0.02)
    async with (
        gateway(engine, api_key=("one", "two"), admin_api_key="chief") as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        ask, abort = stub(channel).Generate, stub(channel).Abort
        request, name = pb.GenerateRequest(text="x", request_id="mine"), pb.AbortRequest(request_id="mine")
        calls = {key: ask(request, metadata=bearer(key), timeout=20) for key in ("one", "two")}
        await eventually(lambda: len(engine.running) == 2)
        assert await abort(name, metadata=bearer("one"), timeout=5) == pb.AbortResponse(aborted=1)
        assert await end(calls["one"]) is grpc.StatusCode.CANCELLED
        assert await abort(name, metadata=bearer("one"), timeout=5) == pb.AbortResponse()
        assert len(engine.running) == 1
        assert await abort(name, metadata=bearer("chief"), timeout=5) == pb.AbortResponse(aborted=1)
        assert await end(calls["two"]) is grpc.StatusCode.CANCELLED
        nameless = ask(request, timeout=5)
        assert await nameless.code() is grpc.StatusCode.UNAUTHENTICATED
