"""The client of a host's agent: runs a command there with this process's standard streams, as ssh does."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import grpc

from allspan import __version__
from allspan.launch.hosts.agent.command import CHUNK
from allspan.launch.hosts.agent.endpoint import AgentConfig, connect, explain
from allspan.launch.hosts.agent.heartbeats import Liveness, ticks
from allspan.protos import agent_pb2
from allspan.protos.agent_pb2_grpc import AgentStub

LOST = 255
"""The exit status of ssh, too, for everything that is not the command's own end."""
MAX_CLOCK_DIFFERENCE_S = 30.0
MAX_CHUNKS = 16


@dataclass(frozen=True)
class Streams:
    """The file descriptors that become the command's; `say` takes a line for the user."""

    stdin: int
    stdout: int
    stderr: int
    say: Callable[[str], None]
    clock: Callable[[], float] = field(default=time.time)


def execute(host: str, command: str, env: Mapping[str, str], config: AgentConfig, streams: Streams) -> int:
    """Returns the command's exit status: its own, 128 + the signal that ended it, or LOST with a line that says why."""
    session = _Session(host, config, streams)
    with connect(host, config) as channel:
        try:
            return session.run(AgentStub(channel), command, env)  # type: ignore[no-untyped-call]
        finally:
            session.end()


class _Session:
    """One command: the main thread writes output, others read the stream, send heartbeats and standard input."""

    def __init__(self, host: str, config: AgentConfig, streams: Streams) -> None:
        self._host = host
        self._config = config
        self._streams = streams
        self._id = secrets.token_bytes(16)
        self._ended = threading.Event()
        self._answered = threading.Event()
        """Set by the first heartbeat, or the refusal."""
        self._refusal: grpc.RpcError | None = None
        self._liveness = Liveness()
        self._outputs: queue.Queue[agent_pb2.ExecOutput | grpc.RpcError | None] = queue.Queue(MAX_CHUNKS)
        self._calls: list[grpc.Call] = []

    def run(self, stub: AgentStub, command: str, env: Mapping[str, str]) -> int:
        limit = self._config.host_timeout
        beats = stub.Beats(self._send_beats(), timeout=None)
        self._calls.append(beats)
        threading.Thread(target=self._listen, args=(beats,), name="beats", daemon=True).start()
        while not self._answered.wait(0.05):
            if self._liveness.is_silent(limit):
                return self._lost(explain(self._host, self._config, f"no answer within {limit:g} s"))
        start = agent_pb2.ExecStart(
            version=__version__,
            time=self._streams.clock(),
            session_id=self._id,
            command=command,
            env=env,
            host_timeout_s=limit,
        )
        if self._refusal is not None:
            return self._lost(self._reason(self._refusal))
        calls = stub.Exec(self._send_input(start))
        self._calls.append(calls)
        threading.Thread(target=self._read, args=(calls,), name="output", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return self._write_all()

    def end(self) -> None:
        self._ended.set()
        for call in self._calls:
            call.cancel()

    def _write_all(self) -> int:
        """Writes output until the command's exit."""
        while True:
            output = self._outputs.get()
            if output is None:
                return self._lost(f"the agent of {self._host} is silent for {self._config.host_timeout:g} s")
            if isinstance(output, grpc.RpcError):
                return self._lost(self._reason(output))
            match output.WhichOneof("output"):
                case "started":
                    self._compare(output.started)
                case "stdout":
                    _write(self._streams.stdout, output.stdout)
                case "stderr":
                    _write(self._streams.stderr, output.stderr)
                case "exit":
                    return 128 + output.exit.signal if output.exit.signal else output.exit.code

    def _compare(self, started: agent_pb2.Started) -> None:
        difference = started.time - self._streams.clock()
        if abs(difference) > MAX_CLOCK_DIFFERENCE_S:
            side = "ahead of" if difference > 0 else "behind"
            self._streams.say(
                f"warning: the clock of {self._host} is {abs(difference):.0f} s {side} this host's: certificates may "
                "be refused, and logs do not fit together; let both follow a time server"
            )

    def _reason(self, error: grpc.RpcError) -> str:
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return f"what listens on port {self._config.agent_port} of {self._host} is another gRPC server: {details}"
        if code == grpc.StatusCode.UNAVAILABLE and self._refusal is not None:
            return explain(self._host, self._config, details)
        return f"the agent of {self._host}: {details} ({code.name})"

    def _lost(self, reason: str) -> int:
        self._streams.say(reason)
        return LOST

    def _listen(self, beats: Iterator[agent_pb2.Beat]) -> None:
        try:
            for _ in beats:
                self._liveness.heard()
                self._answered.set()
        except grpc.RpcError as error:
            if not self._answered.is_set():  # later, Exec breaks for the same reason, or silence tells
                self._refusal = error
                self._answered.set()

    def _send_beats(self) -> Iterator[agent_pb2.Beat]:
        for _ in ticks(self._ended):
            yield agent_pb2.Beat(session_id=self._id)

    def _watch(self) -> None:
        """Ends this command on silence, even while the main thread waits for whoever reads its output."""
        while not self._ended.wait(0.05):
            if self._liveness.is_silent(self._config.host_timeout):
                with contextlib.suppress(queue.Full):
                    self._outputs.put(None, timeout=0.5)
                    return
                self._lost(f"the agent of {self._host} is silent for {self._config.host_timeout:g} s")
                os._exit(LOST)  # nobody reads the output: no other thread can end the program

    def _read(self, outputs: Iterator[agent_pb2.ExecOutput]) -> None:
        try:
            for output in outputs:
                self._outputs.put(output)
        except grpc.RpcError as error:
            self._outputs.put(error)

    def _send_input(self, start: agent_pb2.ExecStart) -> Iterator[agent_pb2.ExecInput]:
        yield agent_pb2.ExecInput(start=start)
        while True:
            try:
                data = os.read(self._streams.stdin, CHUNK)
            except OSError:  # a closed standard input is an empty one
                data = b""
            if not data:
                break
            yield agent_pb2.ExecInput(stdin=data)
        yield agent_pb2.ExecInput(end_of_stdin=True)
        self._ended.wait()


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
