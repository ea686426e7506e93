"""Every request that breaks RFC 9112 gets a 400 in OpenAI's form and the end of its connection, and runs nothing; every
unusual one that keeps it is answered; a client that closes its sending side gets its whole answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from hostile import http_messages
from hostile.http_messages import BODY, BROKEN, LENGTH, request, sized

from support.fake_engine import ANSWER
from support.gateway import Gateway, eventually, fake_engine, gateway

TIMEOUT_S = 5.0
TOGETHER = 16


def address(server: Gateway) -> tuple[str, int]:
    host, port = server.http_address.removeprefix("http://").split(":")
    return host, int(port)


async def exchange(server: Gateway, data: bytes, half_close: bool = False) -> bytes:
    """All that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address(server))
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read()
    finally:
        writer.close()


def refusal(answer: bytes) -> str:
    """The message of a 400 that ends its connection; fails for anything else."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 "), answer[:200]
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("kind", BROKEN)
async def test_what_breaks_the_rules_of_http_is_refused_and_runs_nothing(kind: str) -> None:
    cases = list(BROKEN[kind]())
    assert len(cases) >= 20
    turns = asyncio.Semaphore(TOGETHER)
    async with gateway() as server:

        async def check(name: str, data: bytes) -> None:
            async with turns:
                try:
                    refusal(await exchange(server, data))
                except (AssertionError, TimeoutError, OSError) as error:
                    raise AssertionError(name) from error

        await asyncio.gather(*(check(name, data) for name, data in cases))
        assert not server.engine.asked
        assert (await server.http.get("/health")).status_code == 200


async def test_what_is_unusual_and_allowed_is_answered() -> None:
    cases = list(http_messages.sound())
    assert len(cases) >= 20
    async with gateway() as server:
        for name, data in cases:
            answer = await exchange(server, data.replace(b"\r\nContent-T", b"\r\nConnection: close\r\nContent-T", 1))
            assert answer.startswith(b"HTTP/1.1 200 "), (name, answer[:300])


async def test_a_broken_request_after_sound_ones_is_refused_after_their_answers() -> None:
    async with gateway(fake_engine(step_s=0.01)) as server:
        answers = await exchange(server, sized() + sized() + b"BROKEN\r\n\r\n")
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert answers.count(b"HTTP/1.1 200 ") == 2
        assert refusal(answers[answers.index(b"HTTP/1.1 400 ") :])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_closes_its_sending_side_gets_its_whole_answer(stream: bool, version: bytes) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": stream}).encode()
    data = request(b"Content-Length: %d" % len(body), start=b"POST /v1/completions HTTP/" + version, body=body)
    async with gateway(fake_engine(step_s=0.01)) as server:
        answer = await exchange(server, data, half_close=True)
        assert answer.startswith(b"HTTP/1.1 200 ")
        if stream:
            assert b"data: [DONE]" in answer
        else:
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"][0]["text"] == ANSWER


async def test_each_of_several_requests_is_answered_though_the_client_sends_no_more() -> None:
    async with gateway(fake_engine(step_s=0.005)) as server:
        assert (await exchange(server, 3 * sized(), half_close=True)).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("told_by", ["kernel", "proc", "reset"])
async def test_a_client_that_leaves_after_closing_its_sending_side_stops_its_request(
    told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another machine only a reset tells it, which an interim answer brings about."""
    module = "allspan.client.gateway.server.half_close"
    if told_by == "proc":
        monkeypatch.setattr(f"{module}._asked_of_kernel", lambda own, other: "")
    if told_by == "reset":
        table = f"{module}.SocketTable.owner_of_other_end"
        monkeypatch.setattr(table, lambda table, sock: None)
        monkeypatch.setattr(f"{module}.PROBE_EVERY_S", 0.05)
    engine = fake_engine(endless=True, step_s=0.02)
    async with gateway(engine) as server:
        body = b'{"prompt": "x", "max_tokens": 200}'
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(request(b"Content-Length: %d" % len(body), body=body))
        writer.write_eof()
        await eventually(lambda: engine.asked and engine.last.steps > 5)
        assert not engine.last.stopped
        if told_by == "reset":
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.close()
        await eventually(lambda: engine.last.released)
        assert engine.last.stopped


@pytest.mark.parametrize("cut", [1, 10, 60, len(request(LENGTH)) - 1, len(request(LENGTH)) - len(BODY)])
async def test_a_request_that_ends_too_early_is_refused(cut: int) -> None:
    async with gateway() as server:
        assert "in the middle of a request" in refusal(await exchange(server, sized()[:cut], half_close=True))
        assert not server.engine.asked
