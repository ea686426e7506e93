"""A connection to a rank that accepts and never answers, and its end."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from allspan.client.transport.base import STATUS
from allspan.client.transport.grpc_transport import SERVICE, GrpcTransport
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import Unavailable


@pytest.fixture
async def mute() -> AsyncIterator[GrpcTransport]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(folder) / "s"))
        listener.listen()
        transport = GrpcTransport(f"unix:{folder}/s")
        yield transport
        await transport.close()


def ask(transport: GrpcTransport) -> asyncio.Task[pb.WorkerStatus]:
    return asyncio.create_task(transport.unary(STATUS, pb.StatusRequest(), 10.0))


async def test_closing_fails_calls_under_way_and_does_not_cancel_their_callers(mute: GrpcTransport) -> None:
    call = ask(mute)
    await asyncio.sleep(0)
    await mute.close()
    with pytest.raises(Unavailable, match="closed"):
        await asyncio.wait_for(call, 5.0)


async def test_calls_after_the_end_are_refused(mute: GrpcTransport) -> None:
    await mute.close()
    with pytest.raises(Unavailable, match="closed"):
        await ask(mute)


async def test_a_caller_that_is_cancelled_is_cancelled(mute: GrpcTransport) -> None:
    call = ask(mute)
    await asyncio.sleep(0)
    call.cancel()
    await mute.close()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_call_that_a_server_cancels_at_its_end_found_nobody_there() -> None:
    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(grpc.StatusCode.CANCELLED, "the server ends")
        return b""  # never: abort raises

    handlers = {STATUS.name: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        address = f"unix:{folder}/s"
        server.add_insecure_port(address)
        await server.start()
        transport = GrpcTransport(address)
        with pytest.raises(Unavailable, match="the server ends"):
            await ask(transport)
        await transport.close()
        await server.stop(0)
