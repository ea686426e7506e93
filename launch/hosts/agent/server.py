"""The agent's gRPC service: Exec runs a command, Beats carries the heartbeats of its session."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from allspan import __version__
from allspan.launch.hosts.agent.command import Command
from allspan.launch.hosts.agent.endpoint import OPTIONS, AgentConfig, listen
from allspan.launch.hosts.agent.heartbeats import INTERVAL_S, Liveness, ticks
from allspan.protos import agent_pb2
from allspan.protos.agent_pb2_grpc import AgentServicer, add_AgentServicer_to_server

MAX_SESSIONS = 128
"""Commands at a time; each has two threads of the pool."""
STOP_GRACE_S = 2.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.5, 3600.0


class AgentService(AgentServicer):
    """`say` takes one line for the log."""

    def __init__(
        self,
        config: AgentConfig,
        say: Callable[[str], None],
        version: str = __version__,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._say = say
        self._version = version
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Liveness] = {}

    def Beats(
        self, request_iterator: Iterator[agent_pb2.Beat], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.Beat]:
        self._admit(context)
        first = next(request_iterator, None)
        if first is None:
            return
        ended = threading.Event()
        context.add_callback(ended.set)
        liveness = Liveness()
        with self._lock:
            if first.session_id in self._sessions or len(self._sessions) >= MAX_SESSIONS:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the agent runs {MAX_SESSIONS} commands already")
            self._sessions[first.session_id] = liveness

        def listen_to() -> None:
            try:
                for _ in request_iterator:
                    liveness.heard()
            except grpc.RpcError:
                return  # the callback tells
            finally:
                ended.set()

        threading.Thread(target=listen_to, name="beats", daemon=True).start()
        try:
            for _ in ticks(ended):
                yield agent_pb2.Beat()
        finally:
            with self._lock:
                del self._sessions[first.session_id]

    def Exec(
        self, request_iterator: Iterator[agent_pb2.ExecInput], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.ExecOutput]:
        peer = self._admit(context)
        first = next(request_iterator, None)
        if first is None or not first.HasField("start"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be `start`")
            return  # abort has raised
        start = first.start
        host = socket.gethostname()
        if start.version != self._version:
            words = f"the agent of {host} is allspan {self._version}, the client {start.version}: install the same"
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
        with self._lock:
            liveness = self._sessions.get(start.session_id)
        if liveness is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the session has no heartbeats (Beats)")
        yield agent_pb2.ExecOutput(started=agent_pb2.Started(version=self._version, time=self._clock(), host=host))
        command = Command(start.command, dict(start.env))
        gone = threading.Event()
        if not context.add_callback(gone.set):
            gone.set()
        threading.Thread(target=_feed, args=(request_iterator, command), name="stdin", daemon=True).start()
        limit = min(max(start.host_timeout_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S)
        watched = threading.Thread(target=self._watch, args=(command, liveness, limit, gone, peer), daemon=True)
        watched.start()
        try:
            while (output := _next(command, gone)) is not None:
                yield output
        finally:
            gone.set()
            command.end()

    def _watch(self, command: Command, liveness: Liveness, limit_s: float, gone: threading.Event, peer: str) -> None:
        """Ends the command when its client is silent, whatever the stream's thread waits for."""
        while not gone.wait(INTERVAL_S / 2):
            if liveness.is_silent(limit_s):
                self._say(f"{peer} is silent for {limit_s:g} s; what runs here for it is ended")
                gone.set()
        command.end()

    def _admit(self, context: grpc.ServicerContext) -> str:
        """Returns who calls; refuses who shows a certificate for another purpose."""
        names = context.auth_context().get("x509_common_name", [])
        peer = str(context.peer())
        if self._config.tls.is_given and self._config.agent_peer_name.encode() not in names:
            name = b"".join(names).decode(errors="replace")
            self._say(f"{peer} is refused: its certificate is for {name!r}")
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"your certificate is for {name!r}, commands may be run with one for "
                f"{self._config.agent_peer_name!r} (--agent-peer-name; agent.pem of allspan certs)",
            )
        return peer


class AgentServer:
    """Serves from its construction until `stop`."""

    def __init__(self, service: AgentService, host: str, config: AgentConfig) -> None:
        self._pool = ThreadPoolExecutor(2 * MAX_SESSIONS, thread_name_prefix="agent")
        self._server = grpc.server(self._pool, options=OPTIONS, maximum_concurrent_rpcs=2 * MAX_SESSIONS)
        add_AgentServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        self.port = listen(self._server, host, config)
        self._server.start()

    def stop(self) -> None:
        """Breaks off all streams, which ends their commands."""
        self._server.stop(0).wait(STOP_GRACE_S)
        self._pool.shutdown(wait=True, cancel_futures=True)


def _feed(inputs: Iterator[agent_pb2.ExecInput], command: Command) -> None:
    """Hands standard input on; the end of the stream is its end, too."""
    try:
        for message in inputs:
            if message.end_of_stdin:
                break
            command.write(message.stdin)
    except grpc.RpcError:
        return  # the client is gone; whoever watches ends the command
    finally:
        command.close_stdin()


def _next(command: Command, gone: threading.Event) -> agent_pb2.ExecOutput | None:
    """Returns the next output, or None after the last one and when the client is gone."""
    while not gone.is_set():
        try:
            return command.outputs.get(timeout=INTERVAL_S)
        except queue.Empty:
            continue
    return None
