"""A command that an agent runs: its three streams, its end, and the end of all that it started."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from allspan.protos import agent_pb2

GUARD = Path(__file__).with_name("command_guard.py")
GRACE_S = 0.7
"""Time between SIGTERM and SIGKILL when the client is gone."""
CHUNK = 64 << 10
MAX_CHUNKS = 16
"""Output that waits for a slow client; then the command waits."""


class Command:
    """Runs from its construction; `outputs` carries stdout, stderr and, last, None."""

    def __init__(self, text: str, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        self.outputs: queue.Queue[agent_pb2.ExecOutput | None] = queue.Queue(MAX_CHUNKS)
        self._ended = threading.Event()
        home = os.path.expanduser("~")
        words = [sys.executable, "-IS", str(GUARD), str(theirs.fileno()), str(GRACE_S), text]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                cwd=home if os.path.isdir(home) else "/",
                env={**os.environ, **env},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        threading.Thread(target=self._collect, name="command", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Hands bytes to its standard input; lost when it reads no more."""
        assert self._process.stdin is not None
        try:
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) :]
        except (OSError, ValueError):  # it closed its end, or this end is closed
            return

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            return  # nothing was buffered: there is nothing to lose

    def end(self) -> None:
        """Ends it with all that it started, unless it has ended: SIGTERM, then SIGKILL. Returns at once."""
        self._ended.set()
        try:
            self._control.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has ended

    def _collect(self) -> None:
        """Passes its output on, then its exit."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pumps = [
            threading.Thread(target=self._pump, args=(self._process.stdout, _stdout), daemon=True),
            threading.Thread(target=self._pump, args=(self._process.stderr, _stderr), daemon=True),
        ]
        for pump in pumps:
            pump.start()
        line = b""
        while not line.endswith(b"\n") and (part := self._control.recv(64)):
            line += part
        for pump in pumps:
            pump.join()
        self._process.wait()
        self._control.close()
        self.close_stdin()
        code, number = map(int, line.split()) if line else (0, 9)  # no line: the guard itself was killed
        self._put(agent_pb2.ExecOutput(exit=agent_pb2.Exit(code=code, signal=number)))
        self._put(None)

    def _pump(self, stream: IO[bytes], wrap: Callable[[bytes], agent_pb2.ExecOutput]) -> None:
        with stream:
            while data := stream.read(CHUNK):
                self._put(wrap(data))

    def _put(self, output: agent_pb2.ExecOutput | None) -> None:
        """Waits for room, unless the client is gone: then output goes nowhere."""
        while not self._ended.is_set():
            try:
                self.outputs.put(output, timeout=0.2)
            except queue.Full:
                continue
            return


def _stdout(data: bytes) -> agent_pb2.ExecOutput:
    return agent_pb2.ExecOutput(stdout=data)


def _stderr(data: bytes) -> agent_pb2.ExecOutput:
    return agent_pb2.ExecOutput(stderr=data)
