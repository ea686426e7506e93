"""One side of `allspan bench streaming`, in a process of its own: the client and, for the engine's side, the engine
itself.

Reads one JSON object a line from standard input and answers each with one on standard output:

    {"do": "load", "side": "engine", "model", "settings"}
    {"do": "load", "side": "facade" | "grpc" | "chat" | "completions", "address", "model"}   → {}
    {"do": "round", "prompts": [[id, …], …], "texts": ["…", …], "output_len"}
            → {"tokens", "messages", "seconds", "cpu_s", "gap_s": {"p50", "p90", "max"} | null, "step_s"}

`texts` are the same prompts as user messages. `cpu_s` is this process's own. `gap_s`: the time between a chunk with
tokens and the next one of the same stream, over all streams; null for a side that does not stream. `step_s`: the time
of a decoding step by the statistics of the requests, 0 where they are not told. An error is answered as {"error": "…"}.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allspan.client.bench.load import percentile
from allspan.client.bench.serving.sse import SseConnection, host_and_port
from allspan.protos.api.sampling import SamplingParams

Message = dict[str, Any]


@dataclass
class Received:
    """The tokens, messages and times received for one request, or for several."""

    tokens: int = 0
    messages: int = 0
    gaps: list[float] = field(default_factory=list)
    """Seconds between a chunk with tokens and the next."""
    steps: list[float] = field(default_factory=list)
    """Seconds of a step, one figure for each request whose statistics have it."""

    def add(self, other: Received) -> None:
        self.tokens += other.tokens
        self.messages += other.messages
        self.gaps += other.gaps
        self.steps += other.steps

    def report(self) -> Message:
        gaps = {"p50": percentile(self.gaps, 50), "p90": percentile(self.gaps, 90), "max": max(self.gaps, default=0.0)}
        return {
            "tokens": self.tokens,
            "messages": self.messages,
            "gap_s": gaps if self.gaps else None,
            "step_s": statistics.median(self.steps) if self.steps else 0.0,
        }


_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


def _params(output_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, seed=0)


class OfEngine:
    """`generate` of an engine in this process, or of the facade of a cluster."""

    def __init__(self, request: Message) -> None:
        public = importlib.import_module("allspan")
        if request["side"] == "engine":
            self._engine = public.Engine(request["model"], **request["settings"])
        else:
            self._engine = public.ClientEngine(attach=Path(request["address"]))

    def round(self, request: Message) -> Received:
        answers = self._engine.generate(request["prompts"], _params(request["output_len"]))
        received = Received(sum(len(answer.token_ids) for answer in answers), len(answers))
        for answer in answers:
            if answer.timings is not None and (rate := answer.timings.decode_tokens_per_s) > 0:
                received.steps.append(1 / rate)
        return received


class OfGrpc:
    """`Generate` of the public service, as a Python program calls it: one channel, grpc.aio."""

    def __init__(self, request: Message) -> None:
        from allspan.protos import inference_pb2, inference_pb2_grpc

        grpc_aio = importlib.import_module("grpc.aio")
        self._pb = inference_pb2
        self._loop = _new_loop()

        async def connect() -> Any:
            return grpc_aio.insecure_channel(request["address"])

        self._channel = self._loop.run_until_complete(connect())
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def round(self, request: Message) -> Received:
        async def all_of() -> list[Received]:
            return await asyncio.gather(*(self._one(ids, request["output_len"]) for ids in request["prompts"]))

        return _sum(self._loop.run_until_complete(all_of()))

    def close(self) -> None:
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()

    async def _one(self, ids: list[int], output_len: int) -> Received:
        message = self._pb.GenerateRequest(token_ids=self._pb.TokenIds(ids=ids))
        message.sampling.max_tokens, message.sampling.temperature, message.sampling.ignore_eos = output_len, 0.0, True
        tokens = messages = 0
        arrivals = []
        async for response in self._stub.Generate(message):
            messages += 1
            if response.token_ids:
                tokens += len(response.token_ids)
                arrivals.append(time.perf_counter())
        return Received(tokens, messages, _gaps(arrivals))


class OfHttp:
    """Event streams of chat/completions or completions, one connection a request, kept open."""

    def __init__(self, request: Message) -> None:
        self._host, self._port = host_and_port(request["address"])
        self._model = request["model"]
        self._is_chat = request["side"] == "chat"
        self._connections: list[SseConnection] = []
        self._loop = _new_loop()

    def round(self, request: Message) -> Received:
        asked = request["texts"] if self._is_chat else request["prompts"]
        while len(self._connections) < len(asked):
            self._connections.append(SseConnection(self._host, self._port))

        async def all_of() -> list[Received]:
            pairs = zip(self._connections, asked, strict=False)
            return await asyncio.gather(*(self._one(*pair, request["output_len"]) for pair in pairs))

        return _sum(self._loop.run_until_complete(all_of()))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _one(self, connection: SseConnection, prompt: Any, output_len: int) -> Received:
        messages, last = 0, b""
        arrivals = []

        def count(when: float, data: bytes) -> None:
            nonlocal messages, last
            messages += 1
            if b"completion_tokens" in data:
                last = data
            elif self._has_text(data):
                arrivals.append(when)

        named = {"messages": [{"role": "user", "content": prompt}]} if self._is_chat else {"prompt": prompt}
        body = {"model": self._model, "max_tokens": output_len, "temperature": 0, "ignore_eos": True} | named
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        headers = {"Content-Type": "application/json"}
        await connection.ask("POST", path, headers, json.dumps(body).encode(), count)
        found = _TOKENS.search(last)
        if found is None:
            raise RuntimeError(f"{path} told no usage")
        return Received(int(found[1]), messages, _gaps(arrivals))

    def _has_text(self, data: bytes) -> bool:
        """Returns whether an event has text, rather than a role or a finish reason alone."""
        return (b'"delta":{"content"' if self._is_chat else b'"text":"') in data and b'"text":""' not in data


SIDES: dict[str, Callable[[Message], Any]] = {
    "engine": OfEngine,
    "facade": OfEngine,
    "grpc": OfGrpc,
    "completions": OfHttp,
    "chat": OfHttp,
}


def answer(loaded: list[Any], request: Message) -> Message:
    if request["do"] == "load":
        loaded.append(SIDES[request["side"]](request))
        return {}
    cpu, started = time.process_time(), time.perf_counter()
    received = loaded[-1].round(request)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {**received.report(), "seconds": seconds, "cpu_s": cpu}


def _new_loop() -> asyncio.AbstractEventLoop:
    """Returns uvloop's event loop where it is installed, so that the client costs as little as possible."""
    try:
        return importlib.import_module("uvloop").new_event_loop()  # type: ignore[no-any-return]
    except ImportError:
        return asyncio.new_event_loop()


def _sum(parts: list[Received]) -> Received:
    whole = Received()
    for part in parts:
        whole.add(part)
    return whole


def _gaps(arrivals: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded: list[Any] = []
    for line in sys.stdin:
        try:
            reply = answer(loaded, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
