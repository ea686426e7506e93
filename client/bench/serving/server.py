"""A server that a benchmark starts for itself: `allspan serve` with its gateway, on free ports."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allspan.client.process import STOP_TIMEOUT_S, flags
from allspan.protos.api.errors import DeadlineExceeded, Unavailable

_READY = re.compile(r"HTTP (\S+)/v1, gRPC (\S+), run directory (\S+)")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ServerAddresses:
    """The addresses of a server. `http` is a URL without a path, `grpc` a target."""

    http: str
    grpc: str
    run_dir: Path


class ServerProcess:
    """Starts a server; `wait_ready`, then `close`. It ends by itself when this process does."""

    def __init__(self, model: str, options: Mapping[str, object], quiet: bool = False) -> None:
        self._quiet = quiet
        self._last = "it said nothing"
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        words = [sys.executable, "-m", "allspan.launch.cli", "serve", model, "--port=0", "--grpc-port=0"]
        self._process = subprocess.Popen(
            [*words, f"--parent-pid={os.getpid()}", *flags(options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={"PYTHONSAFEPATH": "1"} | os.environ,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="allspan-server-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id of the gateway, which is the launcher's process as well."""
        return self._process.pid

    def wait_ready(self, timeout: float) -> ServerAddresses:
        """Waits until the server is ready; DeadlineExceeded after `timeout` seconds, Unavailable when it ended before;
        then it is closed."""
        deadline = time.monotonic() + timeout
        try:
            while (line := self._lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if found := _READY.search(line):
                    return ServerAddresses(found[1], found[2], Path(found[3]))
        except queue.Empty:
            self.close()
            raise DeadlineExceeded(f"the server was not ready within {timeout:g} s; last line: {self._last}") from None
        except BaseException:
            self.close()
            raise
        self.close()
        raise Unavailable(f"the server ended before it was ready; last line: {self._last}")

    def close(self) -> None:
        """Ends the server: SIGTERM, ten seconds of grace, SIGKILL. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(timeout=1.0)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._last = line.strip() or self._last
                self._lines.put(line)
                if not self._quiet:
                    sys.stderr.write(line)
        self._lines.put(None)


def cpu_s(pid: int) -> float:
    """Returns the processor seconds that a process of this host has taken; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
