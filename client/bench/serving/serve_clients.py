"""The clients of a server in `allspan bench serve`: event streams of OpenAI's API over raw sockets, or gRPC."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from allspan.client.bench.serving.sse import HttpFailure, SseConnection, host_and_port
from allspan.client.bench.serving.workload import Item, as_text
from allspan.protos.api.errors import ConfigError

BACKENDS = ("openai-chat", "openai", "grpc")
PATHS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}


@dataclass
class Record:
    """The times and the result of one request, on this process's clock (`time.perf_counter()`)."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    """The arrival time of each message with tokens."""
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """The kind of error: an HTTP status, a gRPC status, "connection", "timeout" or "incomplete"."""
    words: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def e2el_s(self) -> float:
        return self.ended - self.started

    @property
    def tpot_s(self) -> float:
        """The mean seconds of a token after the first; 0 for one token."""
        return (self.ended - self.arrivals[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itl_s(self) -> list[float]:
        """The seconds between one message with tokens and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Client(Protocol):
    """A client of the server under test, bound to one asyncio loop."""

    async def model(self) -> str:
        """The name of the model that is served. Raises ConfigError when nobody answers."""

    async def ask(self, item: Item, model: str) -> Record:
        """Sends one request and reads it to its end; failures are in the record."""

    async def close(self) -> None: ...


class HttpClient:
    """The client of OpenAI's endpoints; connections are kept and used again."""

    def __init__(self, base_url: str, backend: str, ignore_eos: bool, timeout: float) -> None:
        self._address = host_and_port(base_url)
        self._path = PATHS[backend]
        self._is_chat = backend == "openai-chat"
        self._ignore_eos = ignore_eos
        self._timeout = timeout
        self._idle: list[SseConnection] = []
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    async def model(self) -> str:
        connection = SseConnection(*self._address)
        try:
            async with asyncio.timeout(self._timeout):
                listed = json.loads(await connection.ask("GET", "/v1/models", self._headers, b"", lambda *_: None))
            return str(listed["data"][0]["id"])
        except (HttpFailure, TimeoutError, ValueError, KeyError, IndexError) as error:
            host, port = self._address
            raise ConfigError(f"--base-url http://{host}:{port}: /v1/models tells no model: {error}") from None
        finally:
            connection.close()

    async def ask(self, item: Item, model: str) -> Record:
        body = self._body(item, model)
        connection = self._idle.pop() if self._idle else SseConnection(*self._address)
        record = Record(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await connection.ask("POST", self._path, self._headers, body, self._reader(record))
            self._idle.append(connection)
        except HttpFailure as failure:
            record.error, record.words = str(failure.status or "connection"), str(failure)
        except TimeoutError:
            record.error = "timeout"
        record.ended = record.arrivals[-1] if record.arrivals and not record.error else time.perf_counter()
        if not record.error and not record.arrivals:
            record.error = "incomplete"
        return record

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _body(self, item: Item, model: str) -> bytes:
        body: dict[str, Any] = {"model": model, "max_tokens": item.output_len, "temperature": 0.0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": as_text(item.prompt)}]
        else:
            body["prompt"] = item.prompt
        return json.dumps(body).encode()

    def _reader(self, record: Record) -> Callable[[float, bytes], None]:
        def read(when: float, data: bytes) -> None:
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                record.error, record.words = "stream", str(event["error"])
            if usage := event.get("usage"):
                record.prompt_tokens = usage["prompt_tokens"]
                record.output_tokens = usage["completion_tokens"]
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or choice
                if delta.get("content") or delta.get("text") or delta.get("reasoning_content"):
                    record.arrivals.append(when)

        return read


class GrpcClient:
    """`allspan.v1.Inference/Generate` on one channel."""

    def __init__(self, base_url: str, ignore_eos: bool, timeout: float) -> None:
        self._pb = importlib.import_module("allspan.protos.inference_pb2")
        self._grpc = importlib.import_module("grpc")
        stubs = importlib.import_module("allspan.protos.inference_pb2_grpc")
        aio = importlib.import_module("grpc.aio")
        self._target = base_url.partition("://")[2] or base_url
        self._channel = aio.insecure_channel(self._target)
        self._stub = stubs.InferenceStub(self._channel)
        self._ignore_eos, self._timeout = ignore_eos, timeout
        key = os.environ.get("OPENAI_API_KEY")
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    async def model(self) -> str:
        try:
            request = self._pb.ListModelsRequest()
            listed = await self._stub.ListModels(request, timeout=self._timeout, metadata=self._metadata)
            return str(listed.models[0].id)
        except (self._grpc.RpcError, IndexError) as error:
            raise ConfigError(f"--base-url {self._target}: ListModels tells no model: {error}") from None

    async def ask(self, item: Item, model: str) -> Record:
        request = self._pb.GenerateRequest(model=model)
        if isinstance(item.prompt, str):
            request.text = item.prompt
        else:
            request.token_ids.ids.extend(item.prompt)
        request.sampling.max_tokens, request.sampling.temperature = item.output_len, 0.0
        request.sampling.ignore_eos = self._ignore_eos
        record = Record(time.perf_counter())
        try:
            async for response in self._stub.Generate(request, timeout=self._timeout, metadata=self._metadata):
                if response.token_ids:
                    record.arrivals.append(time.perf_counter())
                    record.output_tokens += len(response.token_ids)
                if response.HasField("usage"):
                    record.prompt_tokens = response.usage.prompt_tokens
                    record.cached_tokens = response.usage.cached_tokens
        except self._grpc.RpcError as error:
            record.error, record.words = error.code().name, str(error.details())
        record.ended = record.arrivals[-1] if record.arrivals and not record.error else time.perf_counter()
        if not record.error and not record.arrivals:
            record.error = "incomplete"
        return record

    async def close(self) -> None:
        await self._channel.close()


def connect(backend: str, base_url: str, ignore_eos: bool, timeout: float) -> Client:
    """Returns a client for the running loop."""
    if backend == "grpc":
        return GrpcClient(base_url, ignore_eos, timeout)
    return HttpClient(base_url, backend, ignore_eos, timeout)
