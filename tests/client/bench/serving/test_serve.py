"""The serving benchmark: its HTTP client, its arithmetic, and runs against a real gateway over a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from allspan.client.bench.serving.serve import ServeBenchConfig, drive, summary, table
from allspan.client.bench.serving.serve_clients import Record
from allspan.client.bench.serving.serve_plot import plot_serve
from allspan.client.bench.serving.sse import HttpFailure, SseConnection, host_and_port
from allspan.protos.api.errors import ConfigError, Unavailable
from support.gateway import fake_engine, gateway

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def server(*pieces: bytes | None) -> AsyncIterator[SseConnection]:
    """One that answers each request with these bytes, one piece a packet; None ends the connection."""

    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while await reader.read(65536):
                for piece in pieces:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
        except ConnectionError:
            pass  # the client has left
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = SseConnection("127.0.0.1", listening.sockets[0].getsockname()[1])
    try:
        yield connection
    finally:
        connection.close()
        listening.close()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        await asyncio.sleep(0)


async def ask(connection: SseConnection) -> list[bytes]:
    seen: list[bytes] = []
    await asyncio.wait_for(connection.ask("POST", "/", {}, b"{}", lambda when, data: seen.append(data)), 10)
    return seen


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_are_found_however_the_bytes_are_cut(size: int) -> None:
    data = HEAD + b"8;x=y\r\ndata: a\n\r\n1\r\n\n\r\n1b\r\ndata: bb\n\ndata: c\n\n: ping\n\n\r\n0\r\n\r\n"
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    async with server(*pieces) as connection:
        for _ in range(2 if size > 1 else 1):  # the connection is used again
            assert await ask(connection) == [b"a", b"bb", b"c"]


async def test_a_refusal_and_a_broken_answer_are_told_apart() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"
    async with server(refusal) as connection:
        with pytest.raises(HttpFailure, match="busy") as caught:
            await ask(connection)
        assert caught.value.status == 429
    for pieces in ((HEAD, b"8\r\ndata: a\n", None), (b"220 smtp\r\n\r\n",), (HEAD, b"zz\r\n")):
        async with server(*pieces) as connection:
            with pytest.raises(HttpFailure) as caught:
                await ask(connection)
            assert caught.value.status == 0


async def test_a_connection_that_the_server_closed_meanwhile_is_made_anew() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with server(answer, None) as connection:
        for _ in range(3):
            assert await connection.ask("GET", "/", {}, b"", lambda *_: None) == b"ok"
            await asyncio.sleep(0.05)


def test_only_plain_http_addresses_are_taken() -> None:
    assert host_and_port("http://localhost:8000/") == ("localhost", 8000)
    for wrong in ("https://h:1", "localhost:8000", "http://h:x"):
        with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
            host_and_port(wrong)


def records() -> list[Record]:
    one = Record(0.0, [0.1, 0.2, 0.4], 0.4, 10, 4, 4)
    two = Record(1.0, [1.5, 1.6], 1.6, 20, 0, 2)
    return [one, two, Record(1.1, [], 1.2, error="429", words="busy"), Record(1.1, [], 1.2, error="429")]


def test_results_are_those_of_requests_that_came_to_their_end() -> None:
    report = summary(ServeBenchConfig(goodput=("ttft:200", "tpot:150")), records(), 2.0, 0.5)
    assert (report["completed"], report["failed"], report["errors"]) == (2, 2, {"429": 2})
    assert report["error_samples"] == ["busy", ""]
    assert (report["total_input_tokens"], report["total_output_tokens"], report["cached_input_tokens"]) == (30, 6, 4)
    assert (report["output_throughput"], report["total_token_throughput"]) == (3.0, 18.0)
    assert (report["request_throughput"], report["request_goodput"]) == (1.0, 0.5)
    assert report["max_concurrent_requests"] == 3
    assert report["client_cpu_share"] == 0.25
    found = {key: report[f"{key}_ms"] for key in ("p50_ttft", "p99_ttft", "p50_tpot", "p90_itl", "median_e2el")}
    assert found == pytest.approx(
        {"p50_ttft": 100, "p99_ttft": 500, "p50_tpot": 100, "p90_itl": 200, "median_e2el": 500}
    )
    assert "2 completed, 2 failed (2 x 429)" in table(report)


def test_a_run_without_any_success_has_a_table_too() -> None:
    report = summary(ServeBenchConfig(), [Record(0.0, [], 1.0, error="timeout")], 1.0, 0.1)
    assert (report["completed"], report["p99_ttft_ms"], report["request_goodput"]) == (0, 0.0, None)
    assert "1 x timeout" in table(report)


@pytest.mark.parametrize("wrong", ["ttft", "itl:5", "ttft:x", "ttft:0"])
def test_a_limit_that_means_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--goodput has"):
        ServeBenchConfig(goodput=(wrong,))


@pytest.mark.parametrize("backend", ["openai-chat", "openai", "grpc"])
async def test_every_backend_measures_a_server_that_runs(backend: str) -> None:
    config = ServeBenchConfig(
        backend=backend, num_prompts=6, random_input_len=12, random_output_len=8, max_concurrency=3, request_rate=500
    )
    async with gateway(fake_engine(endless=True, step_s=0.002)) as running:
        address = running.grpc_address if backend == "grpc" else running.http_address
        model, found, seconds, cpu_s = await drive(config, address)
    report = summary(config, found, seconds, cpu_s)
    assert model == "tiny"
    assert (report["completed"], report["errors"], report["total_output_tokens"]) == (6, {}, 48)
    assert report["total_input_tokens"] >= 72
    assert report["max_concurrent_requests"] <= 3
    assert 0 < report["p50_ttft_ms"] <= report["p50_e2el_ms"]


@pytest.mark.parametrize(("backend", "kind"), [("openai-chat", "503"), ("grpc", "UNAVAILABLE")])
async def test_failures_are_counted_by_kind_and_the_first_one_ends_the_run(backend: str, kind: str) -> None:
    settings: dict[str, Any] = {"backend": backend, "num_prompts": 2, "random_input_len": 4}
    engine = fake_engine(refusal=Unavailable("no replica takes requests"))
    async with gateway(engine) as running:
        address = running.grpc_address if backend == "grpc" else running.http_address
        _, found, _, _ = await drive(ServeBenchConfig(num_warmups=0, **settings), address)
        assert {record.error for record in found} == {kind}
        with pytest.raises(ConfigError, match=f"the first request to .* failed: {kind}"):
            await drive(ServeBenchConfig(**settings), address)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_serve(str(tmp_path / "p.png"), records(), "a title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
