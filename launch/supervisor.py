"""Keeps a cluster running: starts a world, tells its state in cluster.json, starts the next one when it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from allspan.launch import reaper
from allspan.launch.console import say
from allspan.launch.run_dir import RunDir
from allspan.launch.world import Death, World, WorldPlan, is_readable
from allspan.protos.cluster import ClusterInfo, write_cluster
from allspan.protos.errors import AllspanError, ConfigError, DeadlineExceeded, InternalError, Unavailable

MAX_FAILURES = 3
FAILURE_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.5
LINGER_S = 1.5
"""A dead cluster's file stays readable this long, so that every client learns the cause."""


@dataclass(frozen=True)
class SupervisorConfig:
    """What happens around the world's life."""

    restart: bool = True
    """Start again when a rank dies; up to 3 failures a minute."""
    start_timeout_s: float = 600.0
    """Seconds until every rank must have loaded its part of the model."""
    run_dir: str = ""
    """Folder of the cluster's sockets and state; empty: one under $XDG_RUNTIME_DIR or /tmp."""
    parent_pid: int = 0
    """End when this process is gone; 0: none."""


class Reaper:
    """The process that cleans up should this one be killed."""

    def __init__(self, run: RunDir) -> None:
        words = [sys.executable, "-S", "-E", reaper.__file__, str(run.path), str(run.shm)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        """It ends without doing anything. Idempotent."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(reaper.GOODBYE)
                pipe.close()
            except BrokenPipeError:
                pass  # it is gone already
            self._process.wait(5.0)


class Supervisor:
    """Runs worlds in a thread of its own until `stop`, or until one dies that is not to be followed by another."""

    def __init__(self, plan: WorldPlan, run: RunDir, config: SupervisorConfig) -> None:
        self._plan = plan
        self._run = run
        self._config = config
        self._parent_fds = _watch(config.parent_pid) if config.parent_pid else []
        self._stop_read, self._stop_write = os.pipe()
        self._reaper = Reaper(run)
        self._thread = threading.Thread(target=self._main, name="supervisor", daemon=True)
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._on_end: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._abandoned = False
        self.info: ClusterInfo | None = None
        """The first ready world's."""
        self.error: AllspanError | None = None
        """Why there is no cluster any more, when nobody asked for its end."""

    @property
    def run_dir(self) -> Path:
        return self._run.path

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self) -> bool:
        """Waits for the first world to be ready (bounded by start_timeout_s); False when it ended before."""
        self._ready.wait()
        return self.info is not None

    def on_end(self, callback: Callable[[], None]) -> None:
        """`callback` runs in the supervisor's thread when the cluster is over; at once if it is already."""
        with self._lock:
            if not self._ended.is_set():
                self._on_end = callback
                return
        callback()

    def stop(self) -> None:
        """Asks for the end. Safe in a signal handler; idempotent."""
        os.write(self._stop_write, b"x")

    def join(self) -> None:
        """Waits for the end, which comes by itself, by `stop`, or by the parent's end."""
        self._ended.wait()

    def end_at_once(self) -> None:
        """Kills every process and removes every file, now: for a second signal. The caller must exit afterwards."""
        self._abandoned = True
        reaper.kill(str(self._run.path), 3.0)
        self._run.erase()
        self._reaper.dismiss()

    def _main(self) -> None:
        try:
            self._supervise()
        except AllspanError as error:
            self.error = error
        except Exception as error:  # whatever it is: the main thread waits for this one
            # The folders go away under this thread when a second signal ends everything; anything else is a bug.
            if not self._abandoned:
                sys.stderr.write(traceback.format_exc())
            self.error = InternalError(f"the supervisor failed: {error or type(error).__name__}")
        if not self._abandoned:
            self._clean_up()

    def _clean_up(self) -> None:
        try:
            self._tell(self._state(0, "stopped", self.error.message if self.error else ""))
            self._run.remove()
            self._reaper.dismiss()
        finally:
            with self._lock:
                callback = self._on_end
                self._ended.set()
            self._ready.set()
            if callback is not None:
                callback()

    def _supervise(self) -> None:
        failures: deque[tuple[float, str]] = deque()
        epoch = 0
        while True:
            epoch += 1
            death = self._run_world(epoch)
            if death is None:
                return
            now = time.monotonic()
            failures.append((now, death.cause))
            while now - failures[0][0] > FAILURE_WINDOW_S:
                failures.popleft()
            if not self._config.restart or len(failures) >= MAX_FAILURES:
                self._wait_for_stop(LINGER_S)
                many = (
                    f"{len(failures)} failures within {FAILURE_WINDOW_S:.0f} s, the first: "
                    if len(failures) > 1
                    else ""
                )
                raise Unavailable(f"the cluster is down: {many}{failures[0][1]}")
            delay = FIRST_BACKOFF_S * 2 ** (len(failures) - 1)
            say(f"starting again in {delay:g} s")
            if self._wait_for_stop(delay):
                return

    def _run_world(self, epoch: int) -> Death | None:
        """One world's whole life; None when it was asked to end."""
        self._tell(self._state(epoch, "starting"))
        world = World(self._plan, self._run, epoch)
        gently = False
        try:
            stops = [self._stop_read, *self._parent_fds]
            event = world.wait(stops, done=lambda: world.info() is not None, timeout_s=self._config.start_timeout_s)
            if event == "timeout":
                raise DeadlineExceeded(
                    f"the cluster was not ready within --start-timeout-s {self._config.start_timeout_s:g} s"
                )
            loaded = event == "done"
            if loaded:
                self.info = self.info or world.info()
                self._ready.set()
                if epoch > 1:
                    say(f"the cluster is ready again (epoch {epoch})")
                event = world.wait(stops)
            if event == "stop":
                gently = True
                return None
            death = world.death()
            self._tell(self._state(epoch, "down", death.cause))
            if death.error is not None and not loaded:
                raise death.error
            say(f"the cluster is down: {death.cause}")
            return death
        finally:
            world.end(gently)

    def _tell(self, info: ClusterInfo) -> None:
        """Writes cluster.json. A disk that is full must not keep a dead world's processes and files from their end."""
        try:
            write_cluster(self._run.path, info)
        except OSError as error:
            if not self._abandoned:
                say(f"{self._run.path} cannot be written to: {error.strerror}; clients do not learn: {info.state}")

    def _state(self, epoch: int, state: str, cause: str = "") -> ClusterInfo:
        model = self._plan.config.model
        return ClusterInfo(epoch, state, model.name, model.path, cause=cause, supervisor_pid=os.getpid())

    def _wait_for_stop(self, timeout_s: float) -> bool:
        return is_readable([self._stop_read, *self._parent_fds], timeout_s)


def _watch(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except OSError as error:
        raise ConfigError(f"--parent-pid is {pid}: {error.strerror}") from error
