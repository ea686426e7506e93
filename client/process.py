"""A cluster that a program starts for itself: `allspan serve --no-gateway` as a process, and its ready line."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from allspan.protos.api.errors import (
    AllspanError,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    Unavailable,
    from_code,
)

READY = "ALLSPAN READY "
FAILED = "ALLSPAN FAILED "
STOP_TIMEOUT_S = 10.0
TAIL_LINES = 50

_COMMAND = (sys.executable, "-m", "allspan.launch.cli", "serve")
_PREFIX = re.compile(r"^(allspan( \w+)?: )?(error: )?", re.IGNORECASE)

logger = logging.getLogger("allspan.cluster")


def flags(options: Mapping[str, object]) -> list[str]:
    """Returns `serve`'s flags for options by their names; None leaves one out.

    >>> flags({"ranks": 2, "oversubscribe": True, "restart": False, "threads": None})
    ['--ranks=2', '--oversubscribe', '--no-restart']
    """
    words = []
    for name, value in options.items():
        if not name.isidentifier():
            raise ConfigError(f"serve option {name!r} is no name of a flag")
        if value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}")
    return words


class ClusterProcess:
    """Starts a cluster and waits for it; `close` ends it. It ends by itself when this process does."""

    def __init__(
        self, model: str, options: Mapping[str, object], quiet: bool = False, command: Sequence[str] = ()
    ) -> None:
        self._quiet = quiet
        self._words: deque[str] = deque(maxlen=TAIL_LINES)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        arguments = [*(command or _COMMAND), model, "--no-gateway", f"--parent-pid={os.getpid()}", *flags(options)]
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={"PYTHONSAFEPATH": "1"} | os.environ,  # a file of the current folder must not stand in for a module
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_output, name="allspan-cluster-stdout", daemon=True),
            threading.Thread(target=self._read_log, name="allspan-cluster-stderr", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout: float) -> Path:
        """The run directory, once every rank is ready. Raises what ended the start, DeadlineExceeded after `timeout` s.

        On any failure the process has ended when this returns.
        """
        try:
            return self._wait_ready(time.monotonic() + timeout, timeout)
        except BaseException:
            self.close()
            raise

    def exit_report(self) -> str:
        """The last line of its log, and its exit code if it has ended."""
        words = _PREFIX.sub("", self._words[-1]) if self._words else "it said nothing"
        code = self._process.poll()
        return words if code is None else f"{words} (allspan serve ended with code {code})"

    def close(self) -> None:
        """Ends the cluster: SIGTERM, ten seconds of grace, SIGKILL (its own reaper then ends the ranks). Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.warning("allspan serve (pid %d) did not end within %g s of SIGTERM", self.pid, STOP_TIMEOUT_S)
                self._process.kill()
                self._process.wait()
        for reader in self._readers:
            reader.join(timeout=1.0)

    def _wait_ready(self, deadline: float, timeout: float) -> Path:
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DeadlineExceeded(
                    f"the cluster was not ready within startup_timeout ({timeout:g} s); last line: {self.exit_report()}"
                ) from None
            if line is None:
                raise self._failure()
            if line.startswith(READY):
                return Path(json.loads(line.removeprefix(READY))["run_dir"])
            if line.startswith(FAILED):
                failure = json.loads(line.removeprefix(FAILED))
                raise from_code(failure["code"], failure["message"])

    def _failure(self) -> AllspanError:
        """Returns the error of a process that ended before it was ready, from its exit code and its last line."""
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return InternalError(f"allspan serve (pid {self.pid}) closed its output without being ready")
        for reader in self._readers:
            reader.join(timeout=1.0)
        words = _PREFIX.sub("", self._words[-1]) if self._words else f"allspan serve ended with code {code}"
        return {2: ConfigError, 3: CheckpointError}.get(code, Unavailable)(words)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_log(self) -> None:
        """Forwards the process's log to this process's stderr, and keeps the end of it."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                if line.strip():
                    self._words.append(line.strip())
                if not self._quiet:
                    _forward(line, sys.stderr)


def _forward(line: str, to: IO[str] | None) -> None:
    if to is None or to.closed:
        return
    try:
        to.write(line)
        to.flush()
    except (OSError, ValueError) as error:
        logger.debug("cannot forward the cluster's log: %s", error)
