"""One world over several hosts: an mpirun here, its ranks there, each host's part watched by its keeper."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from allspan.launch.console import say
from allspan.launch.hosts.first_cause import first_cause, is_own
from allspan.launch.hosts.fleet import Fleet
from allspan.launch.hosts.messages import HostError, HostLost, RankExit, RankQuiet, RankStarted
from allspan.launch.hosts.mpirun import Job, RankCommand, command
from allspan.launch.models.file_changes import FileChanges
from allspan.launch.supervision import die_with_parent, mpi, reaper
from allspan.launch.supervision.mpi_notices import NoticeFilter, find_lost_daemon
from allspan.launch.supervision.run_dir import RunDir
from allspan.launch.supervision.world import END_GRACE_S, Death, WorldPlan, error_of, signal_name
from allspan.protos.api.errors import AllspanError, ConfigError, Unavailable
from allspan.protos.cluster import cluster_file
from allspan.protos.config.converted_manifest import is_converted

CAUSE_WAIT_S = 0.3
"""Seconds in which the ends of other ranks are waited for, one of which may have been the cause."""
MPIRUN_WAIT_S = 1.0
"""Seconds in which a rank's end is waited for when mpirun has ended."""
LOOK_MS = 250
TAIL_BYTES = 16384


class HostsWorld:
    """The processes of one world over several hosts, with the methods of `WorldProcess`.

    A host that cannot be reached at its start is a death of that world, so that the supervisor tries again."""

    def __init__(self, plan: WorldPlan, fleet: Fleet, run: RunDir, epoch: int) -> None:
        self.epoch = epoch
        self.weights = FileChanges(Path(plan.config.model.path))
        # The plan's ranks are those of all hosts: a world on the hosts left has fewer.
        self._plan, self._fleet, self._run = plan, fleet, run
        self._ranks: dict[int, cluster_file.RankInfo] = {}
        self._exits: list[RankExit] = []
        self._failed: Death | None = None
        self._tail = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        try:
            may_shrink = epoch > 1 and fleet.can_shrink and not is_converted(Path(plan.config.model.path))
            fleet.connect(fleet.config.min_hosts if may_shrink else 0)
            if fleet.place is not None and len(fleet.used) < len(fleet.hosts):
                self._plan = replace(plan, placement=fleet.place(fleet.used))
            service = plan.config.service
            limits = {"watchdog_timeout": service.watchdog_timeout, "start_timeout": plan.start_timeout_s}
            fleet.begin(run, epoch, limits)
            self._process = self._start()
        except (Unavailable, ConfigError) as error:
            self._failed = Death(error.message, error)
            return
        self._mpirun_fd = os.pidfd_open(self._process.pid)
        self._reader = threading.Thread(target=self._forward_output, name="mpirun-output", daemon=True)
        self._reader.start()

    @property
    def ranks(self) -> tuple[cluster_file.RankInfo, ...]:
        return tuple(info for _, info in sorted(self._ranks.items()))

    @property
    def num_ranks(self) -> int:
        return len(self._plan.placement.ranks)

    def info(self) -> cluster_file.ClusterInfo | None:
        """Returns the state that the leader, which runs on this host, published once every rank was ready."""
        try:
            info = cluster_file.read_cluster(self._run.path)
        except ConfigError:
            return None
        return info if info.epoch == self.epoch and info.state == "ready" else None

    def wait(self, stop_fds: list[int], done: Callable[[], bool] | None = None, timeout_s: float | None = None) -> str:
        """Waits for "stop", "died", "done" or "timeout", as `WorldProcess` does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._read_messages()
            if self._failed is not None or self._exits:
                return "died"
            if done is not None and done():
                return "done"
            poller = select.poll()
            for fd in (*stop_fds, self._mpirun_fd, self._fleet.event_fd):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(50 if done is not None else LOOK_MS)}
            if ready.intersection(stop_fds):
                return "stop"
            if self._mpirun_fd in ready:
                return "died"
            if deadline is not None and time.monotonic() > deadline:
                return "timeout"

    def _read_messages(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fleet.event_fd)
        while True:
            try:
                message = self._fleet.messages.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, HostLost) and self._fleet.is_lost(message):
                cause = f"host {message.host} was lost: {message.cause}"
                self._failed = self._failed or Death(cause)
            elif isinstance(message, HostError):
                say(f"host {message.host}: {message.message}")
            elif isinstance(message, RankStarted) and message.epoch == self.epoch:
                info = cluster_file.RankInfo(message.rank, message.pid, message.host, message.address)
                self._ranks[message.rank] = info
            elif isinstance(message, RankExit) and message.epoch == self.epoch:
                self._exits.append(message)
            elif isinstance(message, RankQuiet) and message.epoch == self.epoch:
                cause = f"rank {message.rank} (pid {message.pid} on {message.host}) {message.words}"
                self._failed = self._failed or Death(cause)

    def death(self) -> Death:
        """Finds out why the world ended, by what the keepers say of their ranks' ends: takes up to 1.3 s."""
        deadline = time.monotonic() + MPIRUN_WAIT_S
        while self._failed is None and not self._exits and time.monotonic() < deadline:
            time.sleep(0.01)
            self._read_messages()
        if self._exits:
            settled = time.monotonic() + CAUSE_WAIT_S
            while time.monotonic() < settled and len(self._exits) < self.num_ranks:
                time.sleep(0.01)
                self._read_messages()
        end = first_cause(self._exits)
        if end is not None and is_own(end):
            return _death(end)
        if self._process is None:  # a host could not be reached: nothing was started
            assert self._failed is not None
            return self._failed
        self._wait_for_silence(self._process)
        if self._failed is not None:
            return self._failed
        code = self._process.poll()
        if code is not None and code < 0:
            return Death(f"mpirun (pid {self._process.pid}) was killed by signal {-code} ({signal_name(-code)})")
        output = self._output()
        if host := find_lost_daemon(output):
            return Death(f"Open MPI's daemon on host {host} ended, or was cut off from this one")
        if end is not None:
            return _death(end)
        lines = [line.strip() for line in output.splitlines() if line.strip(" -\t")]
        said = lines[-1] if lines else "it said nothing"
        return Death(f"mpirun (pid {self._process.pid}) ended with code {code}: {said}")

    def _wait_for_silence(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the loss of a host, where ranks were ended and none has said why: Open MPI, which ends them then,
        may notice a broken link before the host's silence has lasted as long as it may."""
        deadline = time.monotonic() + self._fleet.config.host_timeout + CAUSE_WAIT_S
        while self._failed is None and not find_lost_daemon(self._output()) and time.monotonic() < deadline:
            if (process.poll() or 0) < 0:
                return
            time.sleep(0.01)
            self._read_messages()

    def _output(self) -> str:
        return bytes(self._tail).replace(b"\0", b"").decode(errors="replace")  # Open MPI 5 ends notices with a zero

    def end(self, drain_s: float | None) -> None:
        """Ends every process of the world on every host and removes its files, as `WorldProcess` does."""
        process = self._process
        if process is not None:
            if drain_s:
                self._ask_to_end(process, signal.SIGTERM, drain_s)
            if drain_s is not None:
                self._ask_to_end(process, signal.SIGINT, END_GRACE_S)
            if process.poll() is None:
                process.kill()
        for wrong in self._fleet.clear(self.epoch):
            say(f"warning: {wrong}")
        if process is None:
            return
        reaper.kill(str(self._run.path))
        process.wait(5.0)
        if self._reader is not None:
            self._reader.join(2.0)
        os.close(self._mpirun_fd)
        for pattern in (f"*.e{self.epoch}.*", f"*.e{self.epoch}"):
            for path in self._run.path.glob(pattern):
                path.unlink(missing_ok=True)
        self._run.clear_shm()

    def _ask_to_end(self, process: subprocess.Popen[bytes], number: int, limit_s: float) -> None:
        self._fleet.send({"do": "signal", "number": int(number)})
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)

    def _start(self) -> subprocess.Popen[bytes]:
        plan, fleet, folder = self._plan, self._fleet, self._run.path
        ranks = []
        for place in plan.placement.ranks:
            config = replace(
                plan.config,
                service=replace(
                    plan.config.service,
                    epoch=self.epoch,
                    host=fleet.address(place.host),
                    # A number of this host means nothing on another, where the keeper ends ranks without a supervisor.
                    supervisor_pid=os.getpid() if place.host == fleet.hosts[0].name else 0,
                ),
                parallel=replace(
                    plan.config.parallel,
                    threads=place.threads,
                    cpus=place.cpus,
                    memory_node=-1 if place.node is None else place.node,
                    ranks_on_node=place.sharing,
                ),
            )
            path = folder / f"worker-{place.rank}.e{self.epoch}.json"
            fleet.write(place.host, path, json.dumps(asdict(config)))
            exit_file = folder / f"exit-{place.rank}.e{self.epoch}"
            ranks.append(RankCommand(place, path, exit_file, fleet.interface(place.host)))
        slots = {host.name: host.slots for host in fleet.hosts}
        network = fleet.config.mpi_network or "127.0.0.0/8"
        job = Job(fleet.shell.write_launch_agent(folder), network, folder, self._run.shm, slots)
        words = command(plan.mpirun, job, ranks)
        return subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(die_with_parent.__file__)), str(os.getpid()), *words],
            env=mpi.environment(plan.mpirun, self._run.shm, plan.placement, over_network=True),
            cwd=self._run.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to handle
        )

    def _forward_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        notices = NoticeFilter()
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), 65536):
                self._tail += data
                del self._tail[:-TAIL_BYTES]
                self._show(notices.pass_on(data))
            self._show(notices.rest())

    def _show(self, lines: bytes) -> None:
        with suppress(OSError):  # a log that cannot be written is no reason for the ranks to stop
            sys.stderr.buffer.write(lines)
            sys.stderr.flush()


def _death(end: RankExit) -> Death:
    who = f"rank {end.rank} (pid {end.pid} on {end.host})"
    error: AllspanError | None = error_of(end.report) if end.report else None
    if end.signal:
        why = f", {end.why}" if end.why else ""
        said = f"; its exit report: {error.message}" if error else ""
        return Death(f"{who} was killed by signal {end.signal} ({signal_name(end.signal)}){why}{said}")
    if error is not None:
        return Death(f"{who}: {error.message}", error)
    last = end.words.strip().splitlines()[-1:] or ["it said nothing"]
    return Death(f"{who} ended with code {end.code}: {last[0]}")
