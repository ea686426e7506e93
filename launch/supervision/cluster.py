"""A cluster as its starter sees it: one world or several (replicas), their run directory, and one end for all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from allspan.launch.console import say
from allspan.launch.supervision import reaper
from allspan.launch.supervision.rolling_restart import RollingRestart
from allspan.launch.supervision.run_dir import RunDir
from allspan.launch.supervision.supervisor import Supervisor, SupervisorConfig
from allspan.launch.supervision.world import WorldPlan
from allspan.protos.api.errors import AllspanError
from allspan.protos.cluster.cluster_file import ClusterInfo, replica_dir, write_cluster

DISMISS_S = 5.0
MIN_REAPER_S = 1.0
"""A reaper that ran for less than this many seconds is not replaced at once."""


class Reaper:
    """The process that cleans up should this one be killed. If it is killed itself, another takes its place."""

    def __init__(self, run: RunDir) -> None:
        self._words = [sys.executable, "-S", "-E", reaper.__file__, str(run.path), str(run.shm)]
        self._dismissed = threading.Event()
        self._lock = threading.Lock()
        self._process = self._start()
        threading.Thread(target=self._keep, name="reaper-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """Ends the reaper without a cleanup. Idempotent."""
        with self._lock:
            self._dismissed.set()
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(reaper.GOODBYE)
                pipe.close()
            except BrokenPipeError:
                pass  # it is gone already
            self._process.wait(DISMISS_S)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._words, stdin=subprocess.PIPE, start_new_session=True)

    def _keep(self) -> None:
        while True:
            started, process = time.monotonic(), self._process
            code = process.wait()
            if time.monotonic() - started < MIN_REAPER_S and self._dismissed.wait(MIN_REAPER_S):
                return
            with self._lock:
                if self._dismissed.is_set():
                    return
                try:
                    self._process = self._start()
                except OSError as error:
                    say(f"the reaper (pid {process.pid}) ended and no other can be started: {error.strerror}")
                    return
            if process.stdin is not None:
                process.stdin.close()
            say(f"the reaper (pid {process.pid}) ended with code {code}; pid {self._process.pid} takes its place")


class Cluster:
    """The supervisors of a cluster, one a replica. A cluster of one has its world in the run directory itself, else in
    `replica-N`.

    It is ready once every replica has been. Until then a replica that fails for good ends all; afterwards the others go
    on, until none is left.
    """

    def __init__(self, plans: Sequence[WorldPlan], run: RunDir, config: SupervisorConfig) -> None:
        """`plans[k]` is replica k's; its paths are set here."""
        self._run = run
        self._plans = tuple(plans)
        runs = [run] if len(plans) == 1 else [run.replica(index) for index in range(len(plans))]
        self._supervisors = [
            Supervisor(_plan_at(plan, part.path), part, config, self._changed)
            for plan, part in zip(plans, runs, strict=True)
        ]
        self._restart = RollingRestart(self._supervisors)
        self._reaper = Reaper(run)
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._on_end: Callable[[], None] | None = None
        self._lock = threading.RLock()
        self._asked = False
        self._abandoned = False
        self._given_up: list[Supervisor] = []
        self.info: ClusterInfo | None = None
        """The cluster's state at the moment when every replica was ready for the first time."""
        self.error: AllspanError | None = None
        """The error that ended the cluster, unless `stop` ended it."""

    @property
    def run_dir(self) -> Path:
        return self._run.path

    def start(self) -> None:
        self._tell("starting")
        for supervisor in self._supervisors:
            supervisor.start()

    def wait_ready(self) -> bool:
        """Waits until every replica has been ready (bounded by start_timeout_s); False when it ended before."""
        self._ready.wait()
        return self.info is not None

    def on_end(self, callback: Callable[[], None]) -> None:
        """`callback` runs in a supervisor's thread when the cluster is over; at once if it is already."""
        with self._lock:
            if not self._ended.is_set():
                self._on_end = callback
                return
        callback()

    def restart(self, drain_s: float) -> None:
        """Replaces the worlds of the replicas one after another, each with `drain_s` seconds at most for requests that
        run: the next one's turn comes when the one before is ready again. Nothing while such a restart is under way,
        or before the cluster was ready. Safe in a signal handler."""
        if self.info is not None and not self._asked:
            self._restart.begin(drain_s)

    def stop(self, drain_s: float = 0.0) -> None:
        """Starts the shutdown, after `drain_s` seconds at most for requests that run. Safe in a signal handler."""
        self._asked = True
        for supervisor in self._supervisors:
            supervisor.stop(drain_s)

    def join(self) -> None:
        """Waits for the end, which comes by itself, by `stop`, or by the parent's end."""
        self._ended.wait()

    def end_at_once(self) -> None:
        """Kills every process and removes every file, now: for a second signal. The caller must exit afterwards."""
        self._abandoned = True
        for supervisor in self._supervisors:
            supervisor.abandon()
        reaper.kill(str(self._run.path), 3.0)
        self._run.erase()
        self._reaper.dismiss()

    def _changed(self) -> None:
        """A replica is ready, or over. Runs in its supervisor's thread."""
        with self._lock:
            for supervisor in self._supervisors:
                if supervisor.error is not None and supervisor not in self._given_up:
                    self._given_up.append(supervisor)
                    self._give_up(supervisor.error)
            if all(supervisor.is_over for supervisor in self._supervisors):
                if not self._abandoned and not self._ended.is_set():
                    self._finish()
            elif self.info is None and all(supervisor.info is not None for supervisor in self._supervisors):
                self.info = self._tell("ready")
                self._ready.set()

    def _give_up(self, error: AllspanError) -> None:
        left = sum(not supervisor.is_over for supervisor in self._supervisors)
        if self.info is None:
            for supervisor in self._supervisors:
                supervisor.stop()
        elif left and not self._asked:
            say(f"a replica has ended for good, {left} of {len(self._supervisors)} go on: {error.message}")

    def _finish(self) -> None:
        first = self._given_up[0].error if self._given_up else None
        self.error = None if self._asked else first
        try:
            if not self._asked or self._given_up:
                self._tell("stopped")
            self._run.remove()
            self._reaper.dismiss()
        finally:
            self._ended.set()
            self._ready.set()
            if self._on_end is not None:
                self._on_end()

    def _tell(self, state: str) -> ClusterInfo:
        """The cluster's own file; of one world it is that world's, whose supervisor and leader write it."""
        first = self._supervisors[0].info
        if len(self._supervisors) == 1:
            return first or self._info(state)
        info = self._info(state)
        if first is not None:
            shared = ("max_model_len", "vocab_size", "eos_token_ids", "adapters", "lora_dir")
            info = replace(info, **{name: getattr(first, name) for name in shared})
        try:
            write_cluster(self._run.path, info)
        except OSError as error:
            say(f"{self._run.path} cannot be written to: {error.strerror}; clients do not see the new state, {state}")
        return info

    def _info(self, state: str) -> ClusterInfo:
        config = self._plans[0].config
        count = len(self._supervisors)
        return ClusterInfo(
            1,
            state,
            config.model.name,
            config.model.path,
            cause=self.error.message if self.error else "",
            supervisor_pid=os.getpid(),
            watchdog_timeout=config.service.watchdog_timeout,
            replicas=tuple(replica_dir(Path(), index).name for index in range(count)) if count > 1 else (),
        )


def _plan_at(plan: WorldPlan, path: Path) -> WorldPlan:
    service = replace(plan.config.service, run_dir=str(path))
    return replace(plan, config=replace(plan.config, service=service))
