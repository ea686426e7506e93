"""`python -m allspan.launch.hosts.keeper`: keeps one host's part of a world for a supervisor on another host.

Started through any remote shell. Reads one JSON object a line from standard input and writes such lines to standard
output (`messages` names them). When its input ends, or brings nothing for `host_timeout` seconds, it ends the ranks and
the MPI daemon of the world on this host and removes both folders: a host that is cut off leaves nothing behind.
"""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from allspan.launch.hosts.folders import HostFolders
from allspan.launch.hosts.host_facts import read_facts
from allspan.launch.hosts.lines import LineBuffer, LineWriter, Silence
from allspan.launch.hosts.messages import BEAT_S
from allspan.launch.hosts.ranks import HostRanks
from allspan.launch.supervision import reaper
from allspan.launch.supervision.watchdog import LOOK_S
from allspan.protos.api.errors import AllspanError

TURN_MS = 50
"""Milliseconds between two looks at the clock and at signals."""
FIRST_WORD_S = 30.0
"""Seconds of silence that end a keeper before it knows its limit."""
FENCE_MORE_S = 0.5
"""Seconds by which the process beside the keeper waits longer than the keeper itself."""


class _Log(io.TextIOBase):
    """Standard error, sent as messages: a write never waits for a link that takes none."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell

    def write(self, text: str) -> int:
        if text.strip():
            self._tell({"is": "log", "text": text.strip()})
        return len(text)


class Keeper:
    """One world's part of this host, from `begin` to its end. `run` returns when it is over."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._writer = LineWriter(write_fd, lambda: {"is": "beat", "mono": time.monotonic()}, "keeper-beats")
        self._limit_s = FIRST_WORD_S
        self._folders: HostFolders | None = None
        self._ranks: HostRanks | None = None
        self._fence: subprocess.Popen[bytes] | None = None
        self._silence = Silence()
        self._is_over = ""

    def tell(self, message: dict[str, Any]) -> None:
        self._writer.put(message)

    def end(self, cause: str) -> None:
        """Makes `run` return after its present turn."""
        self._is_over = self._is_over or cause

    def run(self) -> None:
        """Serves until the end: by order, by a signal, or for want of a supervisor."""
        try:
            self._serve()
        finally:
            if self._folders is not None:
                self._folders.remove()
            self._end_fence()
            with suppress(AllspanError):
                self.tell({"is": "error", "message": f"the keeper ends: {self._is_over or 'it failed'}"})
            self._writer.close(0.3)

    def _serve(self) -> None:
        buffer, looked_at, fence_at = LineBuffer(), 0.0, 0.0
        self._silence.heard()
        while not self._is_over:
            poller = select.poll()
            watched = [] if self._folders is None else [self._folders.watch_fd]
            for fd in (self._read_fd, *watched, *(self._ranks.pidfds() if self._ranks else ())):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(TURN_MS)}
            if self._read_fd in ready:
                self._hear(buffer)
            elif self._silence.look() > self._limit_s:
                self.end(f"nothing was heard of the supervisor for {self._limit_s:g} s")
            now = time.monotonic()
            if self._ranks is not None and (ready - {self._read_fd} or now - looked_at > LOOK_S):
                for fd in watched:
                    with suppress(BlockingIOError):
                        os.read(fd, 1 << 16)
                self._ranks.look()
            if self._ranks is not None and now - looked_at > LOOK_S:
                looked_at = now
                self._ranks.watch()
            if now - fence_at > BEAT_S:
                fence_at = now
                self._feed_fence()

    def _hear(self, buffer: LineBuffer) -> None:
        # The descriptor blocks: sshd gives one socket for input and output, and the writer must not fail on it.
        data = os.read(self._read_fd, 1 << 16)
        if not data:
            self.end("the connection to the supervisor ended")
        for message in buffer.feed(data):
            self._do(message)
        self._silence.heard()

    def _do(self, message: dict[str, Any]) -> None:
        error = ""
        try:
            act = _ACTS.get(str(message.get("do")))
            if act is None:
                raise ValueError(f"unknown message {message.get('do')!r}")
            act(self, message)
        except (AllspanError, OSError, KeyError, TypeError, ValueError) as failure:
            error = f"{message.get('do')}: {failure}" if not isinstance(failure, AllspanError) else failure.message
        if "id" in message:
            self.tell({"is": "done", "id": message["id"], "error": error})
        elif error:
            self.tell({"is": "error", "message": error})

    def _begin(self, message: dict[str, Any]) -> None:
        if self._folders is not None:
            raise ValueError("this keeper has begun already")
        limit_s = float(message["host_timeout"])
        limits_s = float(message.get("watchdog_timeout", 30.0)), float(message.get("start_timeout", 600.0))
        run_dir, shm = Path(message["run_dir"]), Path(message["shm"])
        self._folders = HostFolders(run_dir, shm, bool(message.get("adopt", False)))
        self._limit_s = limit_s
        self._ranks = HostRanks(run_dir, self.tell, limits_s)
        self._start_fence()

    def _write_file(self, message: dict[str, Any]) -> None:
        self._begun().write(message["path"], message["text"], int(message.get("mode", 0o600)))

    def _signal(self, message: dict[str, Any]) -> None:
        if self._ranks is not None:
            self._ranks.signal(int(message["number"]))

    def _clear(self, message: dict[str, Any]) -> None:
        epoch = int(message["epoch"])
        self._begun().clear(epoch)
        if self._ranks is not None:
            self._ranks.forget(epoch)

    def _begun(self) -> HostFolders:
        if self._folders is None:
            raise ValueError("begin comes first")
        return self._folders

    def _start_fence(self) -> None:
        """Starts the process that acts when this one is killed or stopped."""
        folders = self._begun()
        words = [str(folders.path), str(folders.shm), str(os.getpid()), str(self._limit_s + FENCE_MORE_S)]
        self._fence = subprocess.Popen(
            [sys.executable, "-S", "-m", "allspan.launch.hosts.fence", *words, str(int(folders.adopted))],
            env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # who kills this process's group does not reach it
        )
        assert self._fence.stdin is not None
        os.set_blocking(self._fence.stdin.fileno(), False)

    def _feed_fence(self) -> None:
        if self._fence is None or self._fence.stdin is None:
            return
        with suppress(OSError):
            os.write(self._fence.stdin.fileno(), b".")
        if self._fence.poll() is not None:
            self._fence.stdin.close()
            self._start_fence()

    def _end_fence(self) -> None:
        if self._fence is not None and self._fence.stdin is not None:
            with suppress(OSError):
                os.write(self._fence.stdin.fileno(), reaper.GOODBYE)
                self._fence.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._fence.wait(1.0)  # then nothing of this world is left when this process ends


_ACTS: dict[str, Callable[[Keeper, dict[str, Any]], None]] = {
    "begin": Keeper._begin,
    "file": Keeper._write_file,
    "beat": lambda keeper, message: None,
    "signal": Keeper._signal,
    "clear": Keeper._clear,
    "end": lambda keeper, message: keeper.end("the supervisor ended it"),
}


def main() -> None:
    # Nothing but messages may be written to the connection: what prints goes to standard error.
    write_fd = os.dup(1)
    os.dup2(2, 1)
    keeper = Keeper(0, write_fd)
    sys.stderr = _Log(keeper.tell)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: keeper.end(f"signal {number}"))
    keeper.tell({"is": "facts", **asdict(read_facts())})
    keeper.run()
    os._exit(0)  # the writer may hang in a link that takes nothing


if __name__ == "__main__":
    main()
