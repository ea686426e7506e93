"""A real `allspan serve` as a process, and what must be gone after it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.launch.supervision import reaper
from support.waiting import wait_until

READY_S = 90.0
"""A cluster on a busy two-core machine, torch imported once a rank."""


class Served:
    """Starts the process; `wait_ready` waits for it. Everything it writes is kept in `log` and `lines`.

    `wrap`: words before the command line, of a program that ends by executing it (so that the process id stays).
    """

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        runtime: Path,
        env: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
    ) -> None:
        self.runtime = runtime
        self.lines: list[str] = []
        self.log = ""
        words = [sys.executable, "-m", "allspan.launch.cli", "serve", str(model), "--port=0", "--grpc-port=0", *flags]
        self.process = subprocess.Popen(
            [*wrap, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), **(env or {})},
        )
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def run_dir(self) -> Path:
        """While it runs."""
        (found,) = [path for path in (self.runtime / "allspan").iterdir() if path.is_dir()]
        return found

    @property
    def http(self) -> str:
        return self._find(r"HTTP (http://\S+)/v1")

    @property
    def grpc(self) -> str:
        return self._find(r"gRPC (\S+:\d+)")

    def wait_ready(self) -> Served:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return "Server is ready" in self.log or any(line.startswith("ALLSPAN READY") for line in self.lines)

        wait_until(is_ready, READY_S, "a ready server")
        return self

    def cluster(self) -> dict[str, Any]:
        info: dict[str, Any] = json.loads((self.run_dir / "cluster.json").read_text())
        return info

    def rank_pid(self, rank: int) -> int:
        return int(self.cluster()["ranks"][rank]["pid"])

    def mpirun_pid(self) -> int:
        """The one of the cluster's processes that is not a rank."""
        ranks = {entry["pid"] for entry in self.cluster()["ranks"]}
        (pid,) = set(reaper.processes(str(self.run_dir))) - ranks
        return pid

    def traces(self) -> Traces:
        """What there is of it now, all of which must be gone after its end."""
        pids = [self.process.pid, *reaper.processes(str(self.run_dir))]
        return Traces(self.runtime, pids, memory_folders(self.runtime))

    def ask_to_end(self, number: int = signal.SIGTERM) -> int:
        """Signals it and returns its exit code, which must come within ten seconds."""
        self.process.send_signal(number)
        return self.wait_exit(10.0)

    def wait_exit(self, timeout: float) -> int:
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(5.0)
        return code

    def kill(self) -> None:
        """For the end of a test, whatever happened in it."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait_exit(10.0)

    def _find(self, pattern: str) -> str:
        match = re.search(pattern, self.log)
        assert match, self.log
        return match[1]

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.log += line


@dataclass(frozen=True)
class Traces:
    """Of a cluster that ran in the folder `runtime`: its processes and its folders of shared memory."""

    runtime: Path
    pids: list[int]
    memory: list[Path]

    def left(self) -> list[str]:
        """What is still there: processes, run directories (with their sockets) and shared memory."""
        base = self.runtime / "allspan"
        folders = [path for path in base.iterdir() if path.is_dir()] if base.exists() else []
        folders += [path for path in {*self.memory, *memory_folders(self.runtime)} if path.exists()]
        return [f"pid {pid}" for pid in self.pids if is_alive(pid)] + [str(path) for path in folders]

    def assert_gone(self, within: float = 10.0) -> None:
        deadline = time.monotonic() + within
        while left := self.left():
            assert time.monotonic() < deadline, f"still there after {within:g} s: {left}"
            time.sleep(0.05)


def memory_folders(runtime: Path) -> list[Path]:
    """The shared-memory folders of the clusters that run in `runtime`."""
    folders = Path("/dev/shm").glob(f"allspan-{os.getuid()}-*")
    return [path for path in folders if reaper.owner_of(path).startswith(f"{runtime}/")]


def is_alive(pid: int) -> bool:
    """Running, not a zombie that waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """A short one: the paths of sockets in it are limited to about 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="al-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_allspan(*argv: str, timeout: float = 150.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """One `allspan` command to its end."""
    words = [sys.executable, "-m", "allspan.launch.cli", *argv]
    env = os.environ | environment
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, env=env)
