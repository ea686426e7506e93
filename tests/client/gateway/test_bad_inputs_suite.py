"""Bad inputs, each against one server with a stream beside it: the stated answer, the stream goes on without a gap,
one log line, no traceback, and nothing stays."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from allspan.protos import inference_pb2 as pb
from support.gateway import Gateway, eventually, fake_engine, gateway, stub

TESTS = Path(__file__).resolve().parents[2]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GAP_S = 1.0
"""A stream's longest silence beside the heaviest of these inputs, on a busy two-core machine: steps come each 5 ms."""
KEPT_BYTES = 48 << 20
"""By which the process may have grown after another hundred megabytes of them, and what was made of those."""


@dataclass
class Bad:
    """One request and what it must be told."""

    body: Any
    """JSON value, or the bytes themselves, or what makes either: the large ones are not kept."""
    words: str = ""
    statuses: tuple[int, ...] = (400,)
    path: str = COMPLETIONS

    def content(self) -> bytes:
        body = self.body() if isinstance(self.body, Callable) else self.body  # type: ignore[arg-type]
        return body if isinstance(body, bytes) else json.dumps(body).encode()


def field(words: str, **fields: Any) -> Bad:
    return Bad({"prompt": "x"} | fields, words)


def said(content: Any, words: str) -> Bad:
    return Bad({"messages": [{"role": "user", "content": content}]}, words, path=CHAT)


def image(url: str) -> Bad:
    return said([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}], "only text")


def biases(count: int) -> bytes:
    return b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(count)) + b"}}"


MANY = 1_000_000
ASKED = {"messages": [{"role": "user", "content": "x"}]}
ROWS: dict[str, list[Bad]] = {
    "1 choices": [
        field("n is 2147483648, must be from 1 to 8", n=2**31),
        field("best_of is 1000000", best_of=10**6),
        field("n is", n=-1),
        Bad({"messages": [{"role": "user", "content": "x"}], "n": 2**31}, "n is 2147483648", path=CHAT),
    ],
    "2 lengths": [
        field("max_tokens is 0, must be from 1", max_tokens=0),
        field("max_tokens is -1", max_tokens=-1),
        field("max_tokens is 9223372036854775808", max_tokens=2**63),
        field("max_tokens is 4096 after a prompt of 1 tokens, at most 4095: the context has 4096", max_tokens=4096),
    ],
    "3 nothing": [
        field("empty", prompt=""),
        field("empty list", prompt=[]),
        field("is empty", prompt=[[]]),
        Bad({"messages": []}, "messages is missing or empty", path=CHAT),
    ],
    "4 too much": [
        Bad(lambda: {"prompt": "x" * 10_000_000}, "10000000 characters, at most"),
        Bad(lambda: b'{"prompt":[97' + b",97" * (MANY - 1) + b"]}", f"prompt has {MANY} "),
        Bad(lambda: b'{"prompt": "' + b"x" * (20 << 20) + b'"}', "larger than", (413,)),
        Bad(lambda: {"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "10000000 characters", path=CHAT),
    ],
    "5 token ids": [
        field("prompt[1] is token id 261, must be from 0 to 260", prompt=[97, 261]),
        field("prompt[1] is token id -1", prompt=[97, -1]),
        field("prompt[2] is True", prompt=[97, 97, True]),
        field("prompt[0] is 1.0", prompt=[1.0]),
    ],
    "6 sampling": [
        Bad(b'{"prompt":"x","temperature":NaN}'),
        Bad(b'{"prompt":"x","temperature":Infinity}'),
        field("temperature", temperature=1e30),
        field("top_p", top_p=0),
        field("top_p", top_p=1.5),
        field("top_k", top_k=-7),
        field("min_p", min_p=2),
        field("presence_penalty", presence_penalty=1e30),
        field("repetition_penalty", repetition_penalty=1e30),
    ],
    "7 log-probabilities": [
        field("logprobs is 1000000, must be from 0 to 20", logprobs=10**6),
        field("prompt_logprobs is 1000000", prompt_logprobs=10**6),
    ],
    "8 stop": [
        field("stop has 10000 entries", stop=["a"] * 10_000),
        field("1048576 characters", stop="a" * 2**20),
        field("non-empty", stop=""),
        field("non-empty", stop=["a", ""]),
    ],
    "9 logit_bias": [
        Bad(lambda: biases(MANY), "strings, at most 65536"),
        Bad(lambda: biases(60_000), "logit_bias"),
        Bad(lambda: b'{"prompt":[[]' + b",[]" * 2_000_000 + b"]}", "entries, at most 1048576"),
        field("must be a token id", logit_bias={"the": 1}),
        Bad(b'{"prompt":"x","logit_bias":{"5":NaN}}'),
    ],
    "14 templates": [
        field("never from a request", chat_template="{{ ''.__class__.__mro__ }}"),
        Bad(
            {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ cycler }}"},
            "chat_template",
            path=CHAT,
        ),
        Bad(
            ASKED | {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            path=CHAT,
        ),
    ],
    "16, 17 media": [
        image("data:image/png;base64,AAAA"),
        said([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], "only text"),
        said([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "only text"),
    ],
    "18 names": [
        Bad({"prompt": "x", "model": "gpt-5"}, "'gpt-5' is not served here", (404,)),
        Bad({"prompt": "x", "model": "../../etc/passwd"}, "not served here", (404,)),
        Bad({"prompt": "x", "model": "tiny\0"}, "NUL", (400, 404)),
    ],
    "20 JSON": [
        Bad(b"", "not valid JSON"),
        Bad(b'{"prompt":', "not valid JSON"),
        Bad(b'{"prompt":"x","prompt":"y"}', 'duplicate key "prompt"'),
        Bad(
            b'{"prompt":"x","stream_options":{"include_usage":true,"include_usage":false},"stream":true}',
            "duplicate key",
        ),
        Bad(b'{"prompt":"x","metadata":{"a":NaN}}', "not valid JSON"),
        Bad(b'{"prompt":"x","user":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "not valid JSON"),
        Bad(b"[" * 10_000, "not valid JSON"),
        Bad(b'{"prompt":"\xff\xfe"}', "not valid JSON"),
        Bad(b'{"prompt":"\\ud800"}', "not valid JSON"),
        Bad(b'{"prompt":"a\0b"}', "not valid JSON"),
        Bad(b'{"prompt":"a\\u0000b"}', "NUL"),
        Bad(b'"text"', "body is"),
        field("max_tokens", max_tokens="7"),
        field("stream", stream="yes"),
    ],
}
ELSEWHERE = {
    "10-13 structured output": ("client/gateway/openai/test_structured.py",),
    "19 adapters": ("client/gateway/test_adapters.py", "protos/config/test_adapters.py"),
    "22 tensors": (),  # there are no fields for them
    "21 protobuf": ("client/gateway/grpc/test_product.py", "client/gateway/grpc/test_fuzz.py"),
    "23 names of requests": ("client/gateway/test_abort.py",),
    "24 slow clients": ("client/gateway/http/test_slow_clients.py",),
}


@dataclass
class Beside:
    """A stream that runs all the while."""

    chunks: int = 0
    longest_s: float = 0.0
    _last: float = 0.0

    def came(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._last) if self._last else 0.0
        self._last = now
        self.chunks += 1

    def forget(self) -> None:
        self.longest_s, self._last = 0.0, time.monotonic()


@asynccontextmanager
async def stream_beside(server: Gateway) -> AsyncIterator[Beside]:
    beside = Beside()

    async def read() -> None:
        body = {"prompt": "beside", "max_tokens": 4000, "stream": True}
        async with server.http.stream("POST", COMPLETIONS, json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    beside.came()

    reading = asyncio.create_task(read())
    await eventually(lambda: beside.chunks > 2)
    yield beside
    seen = beside.chunks
    await eventually(lambda: beside.chunks > seen)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def send(address: str, path: str, content: bytes) -> tuple[httpx.Response, float]:
    """On a thread of its own, beside the server's."""
    with httpx.Client(base_url=address, timeout=30, trust_env=False) as client:
        started = time.monotonic()
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    return response, time.monotonic() - started


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]


async def test_each_is_told_its_answer_and_nobody_else_notices(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = fake_engine(endless=True, step_s=0.005, max_model_len=4096)
    async with gateway(engine) as server, stream_beside(server) as beside:
        for name, row in ROWS.items():
            for bad in row:
                content = await asyncio.to_thread(bad.content)
                await asyncio.sleep(0.02)
                caplog.clear()
                beside.forget()
                response, seconds = await asyncio.to_thread(send, server.http_address, bad.path, content)
                what = f"{name}: {bad.words or bad.body!r}"
                assert response.status_code in bad.statuses, (what, response.text[:500])
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, what
                assert bad.words in error["message"], (what, error["message"])
                assert "Traceback" not in response.text
                assert len(response.content) < 1000, what
                logged = lines(caplog)
                assert len(logged) == 1, (what, [record.getMessage() for record in logged])
                assert "\n" not in logged[0].getMessage()
                assert len(logged[0].getMessage()) < 1000
                assert logged[0].exc_info is None
                print(what[:60], beside.longest_s, seconds)
                assert beside.longest_s < 5 * GAP_S, (what, beside.longest_s)
                assert seconds < (10 if callable(bad.body) else 2), (what, seconds)
        assert len(engine.asked) == 1  # the stream beside
        heavy = [(bad.path, bad.content()) for bad in ROWS["4 too much"][:2]]
        resident = resident_bytes()
        for path, content in heavy * 6:
            await asyncio.to_thread(send, server.http_address, path, content)
        assert resident_bytes() - resident < KEPT_BYTES


URLS = [
    "http://169.254.169.254/latest/meta-data/",
    "file:///etc/passwd",
    "http://127.0.0.1:{port}/redirect",
    "http://localhost:{port}/x.png",
    "http://[::ffff:127.0.0.1]:{port}/x.png",
    "gopher://127.0.0.1:{port}/_x",
]


async def test_no_url_of_a_request_is_ever_connected_to() -> None:
    connected = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer.get_extra_info("peername"))
        writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, gateway() as server:
        for url in URLS:
            for kind, part in (
                ("image_url", {"url": url.format(port=port)}),
                ("file", {"file_url": url.format(port=port)}),
            ):
                content = [{"type": kind, kind: part}]
                answer = await server.post(CHAT, messages=[{"role": "user", "content": content}])
                assert answer.status_code == 400, url
            tools = [{"type": "mcp", "server_url": url.format(port=port), "server_label": "x"}]
            assert (await server.post("/v1/responses", input="x", tools=tools)).status_code == 400
        assert server.engine.asked == {}
    assert connected == []


async def test_log_probabilities_of_a_long_prompt_are_bounded_as_a_whole() -> None:
    async with gateway(fake_engine(max_model_len=200_000)) as server:
        long = await server.post(COMPLETIONS, prompt=[97] * 100_000, prompt_logprobs=20, max_tokens=1)
        assert (long.status_code, long.json()["error"]["param"]) == (400, "prompt_logprobs")
        assert "2100000 log-probabilities, at most 131072" in long.json()["error"]["message"]
        assert (await server.post(COMPLETIONS, prompt=[97] * 500, prompt_logprobs=20, max_tokens=1)).status_code == 200


async def test_text_with_nul_is_refused_over_grpc_as_well() -> None:
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = stub(channel).Generate(pb.GenerateRequest(text="a\0b"), timeout=10)
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "text has a NUL character at 1" in await call.details()


async def test_requests_of_one_name_run_side_by_side() -> None:
    engine = fake_engine(endless=True, step_s=0.005)
    async with gateway(engine) as server:
        headers = {"X-Request-Id": "the-same"}
        body = {"prompt": "x", "max_tokens": 20}
        answers = await asyncio.gather(*(server.http.post(COMPLETIONS, json=body, headers=headers) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}


async def test_a_name_or_path_with_line_breaks_stays_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with gateway() as server:
        for path in ("/a%0aFORGED", "/%1b%5b2J", "/a%0d%0aFORGED", "/" + "%0a" * 500):
            caplog.clear()
            answer = await server.http.get(path)
            assert answer.status_code == 404
            for record in lines(caplog):
                assert record.getMessage().isprintable(), record.getMessage()


async def test_a_flood_and_then_everybody_leaves_again_and_again() -> None:
    """Ten times what there is room for, of which most are told to come back, and all go within 50 ms."""
    engine = fake_engine(endless=True, step_s=0.005)
    async with gateway(engine, max_concurrent_requests=16) as server:
        await server.post(COMPLETIONS, prompt="x", max_tokens=1)
        files, threads = open_files(), threading.active_count()
        for _ in range(3):
            before = len(engine.asked)
            flood = await asyncio.gather(*(hurried(server) for _ in range(160)))
            refusals = [asyncio.create_task(reader.readuntil(b"}}")) for reader, _ in flood]
            await eventually(partial(all_but, refusals, 16), 20)
            for refusal in refusals:
                if refusal.done():
                    assert refusal.result().startswith(b"HTTP/1.1 429 ")
                    assert b"\r\nretry-after: 1\r\n" in refusal.result().lower()
                refusal.cancel()
            for _, writer in flood:
                writer.close()
            await asyncio.gather(*refusals, return_exceptions=True)
            assert len(engine.asked) - before == 16
            await eventually(lambda: all(asked.released for asked in engine.asked.values()))
            for asked in engine.asked.values():
                assert asked.steps - asked.steps_when_stopped <= 2 or not asked.stopped
        await eventually(lambda: open_files() <= files + 2)
        assert threading.active_count() <= threads + 8  # of the pool that is there for all
        answers = await asyncio.gather(*(server.post(COMPLETIONS, prompt="x", max_tokens=5) for _ in range(16)))
        assert {answer.status_code for answer in answers} == {200}


async def hurried(server: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.http_address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt":"x","max_tokens":200}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


def all_but(tasks: list[asyncio.Task[bytes]], count: int) -> bool:
    return sum(task.done() for task in tasks) == len(tasks) - count


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_tested_elsewhere_is_there() -> None:
    missing = [name for names in ELSEWHERE.values() for name in names if not (TESTS / name).exists()]
    assert missing == []
