"""Structure-aware fuzz of the public gRPC service: messages made from descriptors, some of them broken afterwards.

Against a running server, for as long as it may take:

    PYTHONPATH=tests python -m support.grpc_fuzz 127.0.0.1:50051 --seconds 600 --pid PID_OF_THE_SERVER

Every call must end in time with a status that blames the caller; a plain request in between must go through. With --pid
its memory is told at the start and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import psutil
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from allspan.protos import inference_pb2 as pb

SERVICE = "allspan.v1.Inference"
METHODS = {
    "Generate": pb.GenerateRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "ListModels": pb.ListModelsRequest,
    "ServerInfo": pb.ServerInfoRequest,
    "Abort": pb.AbortRequest,
    "Embed": pb.EmbedRequest,
    "Score": pb.ScoreRequest,
    "LoadLora": pb.LoadLoraRequest,
    "UnloadLora": pb.UnloadLoraRequest,
    "ListLoras": pb.ListLorasRequest,
}
WEIGHTS = (20, 4, 4, 1, 1, 2, 4, 4, 1, 1, 1)
BLAMELESS = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "CANCELLED",
    "PERMISSION_DENIED",
}
"""What a server may answer to nonsense."""
CALL_S = 20.0
CONCURRENT = 8
READ_MESSAGES = 12
"""Of a stream; then the client cancels it."""

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_INTEGERS = (0, 1, 2, 3, 7, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_DOUBLES = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 100.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "x",
    "user",
    "system",
    "tiny",
    "Ünï🦊",
    "\0",
    "a b",
    "{{ x }}",
    "x" * 129,
    "<|im_end|>",
    "\u202e",
    "../../x",
)
_BAD_TEXTS = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\x80")


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


class Fuzz:
    """Makes messages; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def call(self) -> tuple[str, bytes]:
        """A method and what to send to it."""
        (method,) = self._random.choices(tuple(METHODS), WEIGHTS)
        kind = METHODS[method] if self._random.random() < 0.95 else self._random.choice(tuple(METHODS.values()))
        data = self.message(kind.DESCRIPTOR)
        return method, self._broken(data) if self._random.random() < 0.35 else data

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def message(self, descriptor: Descriptor, depth: int = 0) -> bytes:
        fields = list(descriptor.fields)
        if depth == 0 and descriptor.name == "GenerateRequest" and self.chance(0.7):
            # Mostly a request that could run, or nothing behind the first check is ever reached.
            most = self._random.choice((3, 8, 3, 8, 3, 8, None))
            sampling = [entry for entry in pb.SamplingOptions.DESCRIPTOR.fields if self.chance(0.05)]
            body = b"".join(self._field(entry, 1) for entry in sampling)
            body += b"" if most is None else tag(1, _VARINT) + varint(most)
            extra = [entry for entry in fields if entry.name not in _PROMPTS and self.chance(0.05)]
            prompt = self._sized(2, b"Hello") if self.chance(0.8) else self._field(self._random.choice(fields[1:4]), 1)
            return prompt + self._sized(5, body) + b"".join(self._field(entry, 1) for entry in extra)
        chosen = [entry for entry in fields if self.chance(0.4)]
        self._random.shuffle(chosen)
        return b"".join(self._field(entry, depth + 1) for entry in chosen)

    def _field(self, field: FieldDescriptor, depth: int) -> bytes:
        if not field.is_repeated:
            return self._value(field, depth)
        count = self._random.choice((0, 1, 2, 5, 40)) if self.chance(0.97) else 3000
        values = [self._value(field, depth) for _ in range(count)]
        return b"".join(values)

    def _value(self, field: FieldDescriptor, depth: int) -> bytes:
        number, kind = field.number, field.type
        if kind in (field.TYPE_DOUBLE, field.TYPE_FIXED64, field.TYPE_SFIXED64):
            data = self._double() if kind == field.TYPE_DOUBLE else self._integer().to_bytes(8, "little")
            return tag(number, _FIXED64) + data
        if kind in (field.TYPE_FLOAT, field.TYPE_FIXED32, field.TYPE_SFIXED32):
            return tag(number, _FIXED32) + self._random.randbytes(4)
        if kind == field.TYPE_MESSAGE:
            return self._sized(number, self.message(field.message_type, depth))
        if kind in (field.TYPE_STRING, field.TYPE_BYTES):
            return self._sized(number, self._text())
        return tag(number, _VARINT) + varint(self._integer())

    def _integer(self) -> int:
        return self._random.choice(_INTEGERS) if self.chance(0.6) else self._random.randrange(300)

    def _double(self) -> bytes:
        return struct.pack("<d", self._random.choice(_DOUBLES) if self.chance(0.7) else self._random.uniform(-3, 3))

    def _text(self) -> bytes:
        if self.chance(0.03):
            return self._random.choice(_BAD_TEXTS)
        if self.chance(0.01):
            return b"y" * self._random.choice((5000, 70_000, 300_000))
        return self._random.choice(_TEXTS).encode()

    def _sized(self, number: int, data: bytes) -> bytes:
        return tag(number, _BYTES) + varint(len(data)) + data

    def _broken(self, data: bytes) -> bytes:
        ways: Sequence[Callable[[bytes], bytes]] = (
            lambda data: data[: self._random.randrange(len(data) + 1)],
            lambda data: data + self._random.randbytes(self._random.choice((1, 7, 200))),
            lambda data: data + self._sized(self._random.choice((99, 2**20, 2**29 - 1)), self._random.randbytes(50)),
            lambda data: data + tag(self._random.randrange(1, 30), self._random.randrange(8)) + b"\1",
            lambda data: data + tag(200, _GROUP) * self._random.choice((1, 99, 20_000)),
            lambda data: data + tag(200, _GROUP) * 90 + tag(200, _END_GROUP) * 90,
            lambda data: data + self._sized(5, self._sized(19, b"\1" * 200_000)),
            lambda data: data + b"\xff" * 11,
            lambda data: data + tag(2, _BYTES) + varint(2**31) + b"x",
            lambda data: data + self._nested(self._random.choice((10, 200, 5000))),
            self._flipped,
        )
        return self._random.choice(ways)(data)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        for _ in range(self._random.randint(1, 4)):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed)

    def _nested(self, depth: int) -> bytes:
        data = b""
        for _ in range(min(depth, 400)):
            data = self._sized(5, data)
        return data


_PROMPTS = {field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields}


class Run:
    """Calls a server and keeps what it answered; AssertionError for what it must never answer."""

    def __init__(self, address: str, seed: int, call_s: float = CALL_S) -> None:
        """`call_s`: what a call may take."""
        self.statuses: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._address = address
        self._call_s = call_s
        self._fuzz = Fuzz(seed)

    async def calls(self, count: int, seconds: float = float("inf")) -> None:
        """At most `count` of them, for `seconds` at most."""
        deadline = time.monotonic() + seconds
        # Metadata limits apart, a channel must survive whatever is sent over it.
        async with grpc.aio.insecure_channel(self._address) as channel:
            done = 0
            while done < count and time.monotonic() < deadline:
                batch = [self._fuzz.call() for _ in range(min(CONCURRENT, count - done))]
                await asyncio.gather(*(self._one(channel, method, data) for method, data in batch))
                done += len(batch)
                if done % (25 * CONCURRENT) < CONCURRENT:
                    await self.canary(channel)
            await self.canary(channel)

    async def canary(self, channel: grpc.aio.Channel) -> None:
        """A good request goes through."""
        request = pb.GenerateRequest(text="Hello", sampling=pb.SamplingOptions(max_tokens=2, ignore_eos=True))
        call = _method(channel, "Generate")(request.SerializeToString(), timeout=self._call_s)
        messages = [pb.GenerateResponse.FromString(data) async for data in call]
        assert messages[-1].finish_reason, "a plain request did not end"

    async def _one(self, channel: grpc.aio.Channel, method: str, data: bytes) -> None:
        started = time.monotonic()
        call = _method(channel, method)(data, timeout=self._call_s)
        try:
            if method == "Generate":
                read = 0
                async for _ in call:
                    read += 1
                    if read == READ_MESSAGES:
                        call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        status = (await call.code()).name
        took = time.monotonic() - started
        self.statuses[f"{method} {status}"] += 1
        self.slowest_s = max(self.slowest_s, took)
        late_by_wish = status == "DEADLINE_EXCEEDED" and took < self._call_s and _asks_for_time(method, data)
        assert status in BLAMELESS or late_by_wish, f"{method} {status} {await call.details()!r}: {data[:500].hex()}"


def _asks_for_time(method: str, data: bytes) -> bool:
    """Whether the message itself sets a deadline."""
    return method == "Generate" and pb.GenerateRequest.FromString(data).timeout_s > 0


def _method(channel: grpc.aio.Channel, method: str) -> Any:
    path = f"/{SERVICE}/{method}"
    return channel.unary_stream(path) if method == "Generate" else channel.unary_unary(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the gRPC service of a running server.")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pid", type=int, default=0, help="of the server, whose memory and descriptors are told")
    parser.add_argument(
        "--call-seconds", type=float, default=CALL_S, help="what a call may take, on a busy machine more"
    )
    given = parser.parse_args(argv)
    run, server = Run(given.address, given.seed, given.call_seconds), psutil.Process(given.pid) if given.pid else None

    def held() -> str:
        if server is None:
            return "unknown"
        size = server.memory_info().rss / 2**20
        return f"{size:.0f} MiB, {server.num_fds()} descriptors, {server.num_threads()} threads"

    print(f"seed {given.seed}; the server holds {held()}", flush=True)
    until = time.monotonic() + given.seconds
    while (left := until - time.monotonic()) > 0:
        asyncio.run(run.calls(10**9, min(left, 60.0)))
        print(
            f"{sum(run.statuses.values())} calls, slowest {run.slowest_s:.1f} s; the server holds {held()}", flush=True
        )
    for name, number in sorted(run.statuses.items()):
        print(f"{number:9d}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
