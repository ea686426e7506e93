"""Connections that never become a request (half TLS handshakes, silence, a byte now and then) are counted, end in their
time, make room for others, and are told in one log line; a start with too few open files is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from allspan.client.gateway import sockets
from allspan.client.gateway.app import bind, new_event_loop
from allspan.client.gateway.server.connections import SPARE, WARN_EVERY_S
from allspan.protos.api.errors import ConfigError
from support.certificates import Certificates
from support.gateway import Gateway, eventually, fake_engine, gateway, gateway_config

HEADER_TIMEOUT_S = 1.0
MOST = 24
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def client_hello(certificates: Certificates) -> bytes:
    context = ssl.create_default_context(cafile=certificates.pem("ca"))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def beginnings(hello: bytes) -> list[bytes]:
    """First bytes of clients that never finish a handshake."""
    cut = [hello[:size] for size in (1, 2, 3, 4, 5, 6, 9, 10, 43, 44, 100, len(hello) // 2, len(hello) - 1)]
    other_kinds = [bytes((kind, *hello[1:])) for kind in (0, 20, 21, 23, 24, 255)]
    lies = [hello[:3] + size.to_bytes(2) + hello[5:] for size in (0, 1, 16384, 65535)]
    return [b"", hello, *cut, *other_kinds, *lies, hello + hello, GET, bytes(100), b"\x80\x2e\x01\x00\x02", hello[::-1]]


def half_requests() -> list[bytes]:
    """First bytes of clients that never finish a request's head."""
    cut = [GET[:size] for size in range(1, len(GET), 2)]
    return [b"", b"\r\n", b"\r\n\r\n", *cut, b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nA: " + b"b" * 1000]


class Flood:
    """Connections that are held open."""

    def __init__(self, server: Gateway) -> None:
        host, port = server.http_address.split("://")[1].split(":")
        self._address = (host, int(port))
        self.writers: list[asyncio.StreamWriter] = []
        self.ends: list[asyncio.Task[bytes]] = []

    async def add(self, first: bytes) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(first)
        self.writers.append(writer)
        self.ends.append(asyncio.create_task(self._until_the_end(reader)))

    async def drip(self, data: bytes) -> None:
        """A byte after another, until the server hangs up."""
        for value in data:
            for writer in self.writers:
                if not writer.is_closing():
                    writer.write(bytes((value,)))
            await asyncio.sleep(0.1)

    @property
    def left(self) -> int:
        return sum(not end.done() for end in self.ends)

    @staticmethod
    async def _until_the_end(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read()
        except OSError:
            return b""


@contextlib.asynccontextmanager
async def flood(server: Gateway) -> AsyncIterator[Flood]:
    made = Flood(server)
    try:
        yield made
    finally:
        for writer in made.writers:
            writer.close()
        await asyncio.gather(*made.ends)


@pytest.mark.parametrize("over_tls", [False, True])
async def test_connections_without_a_request_make_room_and_end_in_their_time(
    over_tls: bool, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kinds = beginnings(client_hello(certificates)) if over_tls else half_requests()
    assert len(kinds) >= 20
    tls = {"ssl_certfile": certificates.pem("server"), "ssl_keyfile": certificates.key("server")} if over_tls else {}
    verify = ssl.create_default_context(cafile=certificates.pem("ca"))
    limits = {"header_timeout": HEADER_TIMEOUT_S, "max_connections": MOST}
    async with gateway(**limits, **tls) as server, flood(server) as held:
        for first in 8 * kinds:
            await held.add(first)
        async with httpx.AsyncClient(base_url=server.http_address, verify=verify, trust_env=False) as http:
            assert (await http.get("/health")).status_code == 200
        await eventually(lambda: held.left <= MOST + SPARE)
        await eventually(lambda: held.left == 0, 5 * HEADER_TIMEOUT_S)
        # A line about handshakes that failed first may hold this one back.
        await eventually(lambda: "HTTP connections, the most there may be" in caplog.text, WARN_EVERY_S + 5.0)
    lines = [record.getMessage() for record in caplog.records if "most there may be" in record.getMessage()]
    assert len(lines) == 1
    assert f"{MOST} HTTP connections" in lines[0]


async def test_a_handshake_that_drips_ends_however_steadily_it_does(certificates: Certificates) -> None:
    tls = {"ssl_certfile": certificates.pem("server"), "ssl_keyfile": certificates.key("server")}
    async with gateway(header_timeout=HEADER_TIMEOUT_S, **tls) as server, flood(server) as held:
        for _ in range(20):
            await held.add(b"")
        dripping = asyncio.create_task(held.drip(client_hello(certificates)[:100]))
        began = time.monotonic()
        await eventually(lambda: held.left == 0, 10 * HEADER_TIMEOUT_S)
        assert time.monotonic() - began >= 0.9 * HEADER_TIMEOUT_S
        dripping.cancel()


async def test_a_flood_leaves_idle_connections_half_the_room_and_ends_no_working_one() -> None:
    engine = fake_engine(endless=True, step_s=0.01)
    async with gateway(engine, max_connections=MOST) as server, flood(server) as held:
        assert (await server.http.get("/health")).status_code == 200  # and its connection is kept
        kept = len(server.http._transport._pool.connections)  # type: ignore[attr-defined]
        working = asyncio.create_task(server.post("/v1/completions", prompt="x", max_tokens=100))
        await eventually(lambda: engine.asked)
        for _ in range(10 * MOST):
            await held.add(b"")
        assert (await working).json()["usage"]["completion_tokens"] == 100
        pool = server.http._transport._pool.connections  # type: ignore[attr-defined]
        assert (kept, [connection.is_closed() for connection in pool]) == (1, [False])


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    most = [0]
    monkeypatch.setattr(sockets.resource, "getrlimit", lambda what: (most[0], most[0]))
    return most


@pytest.mark.parametrize("most", [*range(1, 1000, 70), 255, 256, 257, 258, 355, 3327])
def test_too_few_open_files_are_refused_with_the_number_and_what_would_do(few_files: list[int], most: int) -> None:
    few_files[0] = most
    with pytest.raises(ConfigError, match=f"need 3328 open files.* may open {most}; .*ulimit -n 3328") as refused:
        bind(gateway_config())
    words = refused.value.message.split()
    if "give" in words:  # what it says fits
        http, grpc = (int(words[words.index(flag) + 1]) for flag in ("--max-connections", "--grpc-max-connections"))
        fewer = [int(word) for word in refused.value.message.partition("give ")[2].split()[1::2]]
        assert (http, grpc) == (2048, 1024)
        bind(gateway_config(max_connections=fewer[0], grpc_max_connections=fewer[1])).close()
    else:
        assert most < sockets.RESERVED_FILES + 10


def test_just_enough_open_files_do(few_files: list[int]) -> None:
    few_files[0] = 3328
    bind(gateway_config()).close()


SERVER = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
from hostile.test_connections import serve_flooded
serve_flooded(sys.argv[1])
"""


def serve_flooded(folder: str) -> None:
    """The gateway on uvloop until standard input ends; prints its address."""

    async def serve() -> None:
        tls = {"ssl_certfile": f"{folder}/server.pem", "ssl_keyfile": f"{folder}/server.key"}
        limits = {"max_connections": 244, "grpc_max_connections": 100, "header_timeout": 5.0}
        async with gateway(**limits, **tls) as server:
            print(server.http_address, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve())


@pytest.mark.nightly
def test_five_thousand_half_handshakes_under_six_hundred_files_shut_nobody_out(certificates: Certificates) -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    words = [sys.executable, "-c", SERVER, str(certificates.folder)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    pipe, env = subprocess.PIPE, os.environ | {"PYTHONPATH": path}
    try:
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                address = process.stdout.readline().strip().split("//")[1]
                asyncio.run(_flood_and_ask(process.pid, address, certificates))
                process.stdin.close()
                assert process.wait(20) == 0
            finally:
                process.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


async def _flood_and_ask(pid: int, address: str, certificates: Certificates) -> None:
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=certificates.pem("ca"))
    held = []
    for count, first in enumerate([client_hello(certificates), b""] * 2500):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)
        held.append(writer)
        if count % 500 == 499:
            async with httpx.AsyncClient(base_url=f"https://{address}", verify=context, trust_env=False) as http:
                assert (await http.get("/health", timeout=10)).status_code == 200
            assert len(os.listdir(f"/proc/{pid}/fd")) <= 600
    for writer in held:
        writer.close()
    deadline = time.monotonic() + 15
    while len(os.listdir(f"/proc/{pid}/fd")) > 60:
        assert time.monotonic() < deadline, "connections are left"
        await asyncio.sleep(0.1)
