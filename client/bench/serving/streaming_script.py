"""One side of `allspan bench streaming`, in a process of its own: who asks, and, for the engine, the engine itself.

Reads one JSON object a line from standard input and answers each with one on standard output:

    {"do": "load", "side": "engine", "model", "settings"}
    {"do": "load", "side": "facade" | "grpc" | "chat" | "completions", "address", "model"}   → {}
    {"do": "round", "prompts": [[id, …], …], "texts": ["…", …], "output_len"}
                                              → {"tokens", "messages", "seconds", "cpu_s"}

`texts` are the same prompts as user messages. `cpu_s` is this process's own. An error is answered as {"error": "…"}.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allspan.client.bench.serving.sse import SseConnection, host_and_port
from allspan.protos.api.sampling import SamplingParams

Message = dict[str, Any]
Counts = tuple[int, int]
"""Tokens, and the messages that they came in."""

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

    def round(self, request: Message) -> Counts:
        answers = self._engine.generate(request["prompts"], _params(request["output_len"]))
        return sum(len(answer.token_ids) for answer in answers), len(answers)


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

    def round(self, request: Message) -> Counts:
        async def all_of() -> list[Counts]:
            return await asyncio.gather(*(self._one(ids, request["output_len"]) for ids in request["prompts"]))

        return _sum(self._loop.run_until_complete(all_of()))

    def close(self) -> None:
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()

    async def _one(self, ids: list[int], output_len: int) -> Counts:
        message = self._pb.GenerateRequest(token_ids=self._pb.TokenIds(ids=ids))
        message.sampling.max_tokens, message.sampling.temperature, message.sampling.ignore_eos = output_len, 0.0, True
        tokens = messages = 0
        async for response in self._stub.Generate(message):
            tokens += len(response.token_ids)
            messages += 1
        return tokens, messages


class OfHttp:
    """Event streams of chat/completions or completions, one connection a request, kept open."""

    def __init__(self, request: Message) -> None:
        self._host, self._port = host_and_port(request["address"])
        self._model = request["model"]
        self._is_chat = request["side"] == "chat"
        self._connections: list[SseConnection] = []
        self._loop = _new_loop()

    def round(self, request: Message) -> Counts:
        asked = request["texts"] if self._is_chat else request["prompts"]
        while len(self._connections) < len(asked):
            self._connections.append(SseConnection(self._host, self._port))

        async def all_of() -> list[Counts]:
            pairs = zip(self._connections, asked, strict=False)
            return await asyncio.gather(*(self._one(*pair, request["output_len"]) for pair in pairs))

        return _sum(self._loop.run_until_complete(all_of()))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _one(self, connection: SseConnection, prompt: Any, output_len: int) -> Counts:
        messages, last = 0, b""

        def count(when: float, data: bytes) -> None:
            nonlocal messages, last
            messages += 1
            if b"completion_tokens" in data:
                last = data

        named = {"messages": [{"role": "user", "content": prompt}]} if self._is_chat else {"prompt": prompt}
        body = {"model": self._model, "max_tokens": output_len, "temperature": 0, "ignore_eos": True} | named
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        headers = {"Content-Type": "application/json"}
        await connection.ask("POST", path, headers, json.dumps(body).encode(), count)
        found = _TOKENS.search(last)
        if found is None:
            raise RuntimeError(f"{path} told no usage")
        return int(found[1]), messages


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
    tokens, messages = loaded[-1].round(request)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"tokens": tokens, "messages": messages, "seconds": seconds, "cpu_s": cpu}


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: who asks should cost as little as can be."""
    try:
        return importlib.import_module("uvloop").new_event_loop()  # type: ignore[no-any-return]
    except ImportError:
        return asyncio.new_event_loop()


def _sum(counts: list[Counts]) -> Counts:
    return sum(count[0] for count in counts), sum(count[1] for count in counts)


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
