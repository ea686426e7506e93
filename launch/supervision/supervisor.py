"""Supervises one world: starts it, writes its state into cluster.json, and restarts it after a failure."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from allspan.launch.console import say
from allspan.launch.hosts.world import HostsWorld
from allspan.launch.supervision.run_dir import RunDir
from allspan.launch.supervision.world import Death, WorldPlan, WorldProcess, is_readable
from allspan.protos.api.errors import AllspanError, ConfigError, DeadlineExceeded, InternalError, Unavailable
from allspan.protos.cluster.cluster_file import ClusterInfo, write_cluster

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 5.0
LINGER_S = 1.5
"""Seconds for which a stopped cluster's file stays readable, so that every client can read the cause."""


@dataclass(frozen=True)
class SupervisorConfig:
    """The settings for supervising and restarting worlds."""

    restart: bool = True
    """Starts the ranks again when one dies, is silent for too long or makes no progress."""
    max_failures: int = 6
    """Gives up with exit code 1 at this many failures within --failure-window-s."""
    failure_window_s: float = 120.0
    """Sets the seconds over which --max-failures counts."""
    start_timeout_s: float = 600.0
    """Sets the seconds within which every rank must have loaded its part of the model."""
    watchdog_timeout: float = 30.0
    """Sets the seconds that a rank may be silent, or its busy step loop may make no progress, before all ranks are
    ended."""
    run_dir: str = ""
    """Sets the folder of the cluster's sockets and state; empty makes one under $XDG_RUNTIME_DIR or /tmp."""
    parent_pid: int = 0
    """Ends the cluster when the process with this id is gone; 0 watches none."""


class Trigger:
    """An event that a thread waits for beside file descriptors: `fd` is readable while it is set. Safe in a signal
    handler."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()

    def set(self) -> None:
        os.write(self._write, b"x")

    def clear(self) -> bool:
        """Returns whether it was set."""
        was_set = is_readable([self.fd], 0.0)
        if was_set:
            os.read(self.fd, 4096)
        return was_set


class Supervisor:
    """Runs worlds in a thread of its own until `stop`, or until one fails that must not be restarted.

    `on_change` is called in that thread when the first world is ready, and when there will be no more.
    """

    def __init__(self, plan: WorldPlan, run: RunDir, config: SupervisorConfig, on_change: Callable[[], None]) -> None:
        self._plan = plan
        self._run = run
        self._config = config
        self._on_change = on_change
        self._parent_fds = _watch(config.parent_pid) if config.parent_pid else []
        self._stop = Trigger()
        self._replacement = Trigger()
        self._thread = threading.Thread(target=self._main, name="supervisor", daemon=True)
        self._failures: deque[tuple[float, str]] = deque()
        self._drain_until = 0.0
        self._abandoned = False
        self.info: ClusterInfo | None = None
        """The first ready world's."""
        self.ready_epoch = 0
        """The epoch of the world that is ready now; 0 while none is."""
        self.is_over = False
        """There is no world, and there will be none."""
        self.error: AllspanError | None = None
        """The error that ended supervision, unless `stop` ended it."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float = 0.0) -> None:
        """Starts the shutdown, after `drain_s` seconds at most for requests that run. Safe in a signal handler."""
        self._drain_until = time.monotonic() + drain_s
        self._stop.set()

    def replace_world(self, drain_s: float) -> None:
        """Ends the present world, once its requests have had `drain_s` seconds to finish, and starts another one."""
        self._drain_until = time.monotonic() + drain_s
        self._replacement.set()

    def abandon(self) -> None:
        """The world's processes and files are about to go away under this supervisor; it must not mind."""
        self._abandoned = True

    def _main(self) -> None:
        try:
            self._supervise()
        except AllspanError as error:
            self.error = error
        except Exception as error:  # whatever it is: others wait for this thread
            # The folders go away under this thread when a second signal ends everything; anything else is a bug.
            if not self._abandoned:
                sys.stderr.write(traceback.format_exc())
            self.error = InternalError(f"the supervisor failed: {error or type(error).__name__}")
        if self._abandoned:
            return
        try:
            self._tell(self._state(0, "stopped", self.error.message if self.error else ""))
        finally:
            self.is_over = True
            self._on_change()

    def _supervise(self) -> None:
        epoch = 0
        while True:
            epoch += 1
            death = self._run_world(epoch)
            if self._replacement.clear() and not self._must_stop:
                continue
            if death is None:
                return
            if not self._may_restart:
                self._wait_for_stop(LINGER_S)
                many = len(self._failures)
                within = f"{many} failures within {self._config.failure_window_s:g} s, the first: " if many > 1 else ""
                raise Unavailable(f"{self._plan.title} is down: {within}{self._failures[0][1]}")
            delay = min(FIRST_BACKOFF_S * 2 ** (len(self._failures) - 1), MAX_BACKOFF_S)
            say(f"{self._plan.name}the ranks start again in {delay:g} s")
            if self._wait_for_stop(delay):
                return

    def _run_world(self, epoch: int) -> Death | None:
        """Runs one world from its start to its end; returns None when `stop` or `replace_world` ended it."""
        self._tell(self._state(epoch, "starting"))
        world = _start_world(self._plan, self._run, epoch)
        drain_s: float | None = None
        try:
            stops = [*self._stop_fds, self._replacement.fd]
            event = world.wait(stops, done=lambda: world.info() is not None, timeout_s=self._plan.start_timeout_s)
            loaded = event == "done"
            if loaded:
                self._note_ready(world)
                event = world.wait(stops)
            if event == "stop":
                self._tell_end(epoch)
                if loaded:
                    drain_s = max(0.0, self._drain_until - time.monotonic())
                return None
            death = self._late() if event == "timeout" else world.death()
            self._note_failure(death)
            # A start that failed by itself is not tried again: the next one would fail, too.
            fatal = death.error if self.info is None else None
            self._tell(self._state(epoch, "down", death.cause, fatal is None and self._may_restart))
            if fatal is not None:
                raise fatal
            say(f"{self._plan.title} is down: {death.cause}")
            return death
        finally:
            self.ready_epoch = 0
            world.end(drain_s)

    def _tell_end(self, epoch: int) -> None:
        """Writes that no client may attach to this world any more, nor to any other unless it is being replaced."""
        if self._must_stop:
            self._tell(self._state(epoch, "stopped"))
        else:
            say(f"{self._plan.title} is being restarted")
            self._tell(self._state(epoch, "down", f"{self._plan.title} is being restarted", will_restart=True))

    @property
    def _stop_fds(self) -> list[int]:
        return [self._stop.fd, *self._parent_fds]

    @property
    def _must_stop(self) -> bool:
        return is_readable(self._stop_fds, 0.0)

    def _late(self) -> Death:
        message = f"{self._plan.title} was not ready within --start-timeout-s {self._plan.start_timeout_s:g} s"
        return Death(message, DeadlineExceeded(message))

    def _note_ready(self, world: WorldProcess | HostsWorld) -> None:
        if self.info is None:
            self.info = world.info()
            self._on_change()
        self.ready_epoch = world.epoch
        if changed := world.weights.first():
            say(f"warning: the ranks may have read two versions of the weights: {changed}")
        if world.epoch > 1:
            say(f"{self._plan.title} is ready again (epoch {world.epoch})")

    def _note_failure(self, death: Death) -> None:
        now = time.monotonic()
        self._failures.append((now, death.cause))
        while now - self._failures[0][0] > self._config.failure_window_s:
            self._failures.popleft()

    @property
    def _may_restart(self) -> bool:
        """Returns whether another world may be started after the failures so far."""
        return self._config.restart and len(self._failures) < self._config.max_failures

    def _tell(self, info: ClusterInfo) -> None:
        """Writes cluster.json. A full disk must not prevent the cleanup of an ended world's processes and files."""
        try:
            write_cluster(self._run.path, info)
        except OSError as error:
            if not self._abandoned:
                say(
                    f"{self._run.path} cannot be written to: {error.strerror}; clients do not see the new "
                    f"state, {info.state}"
                )

    def _state(self, epoch: int, state: str, cause: str = "", will_restart: bool = False) -> ClusterInfo:
        model, service = self._plan.config.model, self._plan.config.service
        return ClusterInfo(
            epoch,
            state,
            model.name,
            model.path,
            cause=cause,
            supervisor_pid=os.getpid(),
            will_restart=will_restart,
            watchdog_timeout=service.watchdog_timeout,
        )

    def _wait_for_stop(self, timeout_s: float) -> bool:
        return is_readable(self._stop_fds, timeout_s)


def _start_world(plan: WorldPlan, run: RunDir, epoch: int) -> WorldProcess | HostsWorld:
    return WorldProcess(plan, run, epoch) if plan.fleet is None else HostsWorld(plan, plan.fleet, run, epoch)


def _watch(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except OSError as error:
        raise ConfigError(f"--parent-pid is {pid}: {error.strerror}") from error
