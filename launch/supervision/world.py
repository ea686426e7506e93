"""One world: an mpirun and its ranks, from their start to the end of the last process."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from allspan.launch.console import size
from allspan.launch.logs import ForeignLines
from allspan.launch.models.file_changes import FileChanges
from allspan.launch.placement.placement import Placement
from allspan.launch.supervision import die_with_parent, mpi, mpi_notices, reaper, stacks
from allspan.launch.supervision.mpi_notices import NoticeFilter
from allspan.launch.supervision.oom import OomWatch
from allspan.launch.supervision.run_dir import RunDir
from allspan.launch.supervision.watchdog import LOOK_S, Lost, Watchdog
from allspan.protos.api import errors
from allspan.protos.api.errors import AllspanError, ConfigError, InternalError
from allspan.protos.cluster import cluster_file, logs
from allspan.protos.config.settings import WorkerConfig

if TYPE_CHECKING:
    from allspan.launch.hosts.fleet import Fleet

TAIL_BYTES = 16384
END_GRACE_S = 3.0
"""Seconds for a rank's orderly shutdown, once nothing runs on it."""
CAUSE_WAIT_S = 1.5
"""Seconds to wait for the messages of mpirun and the ranks about a failure, which a busy machine delays."""


@dataclass(frozen=True)
class WorldPlan:
    """The settings to start worlds of one cluster; `config` is rank 0's but for epoch, threads and processors."""

    config: WorkerConfig
    placement: Placement
    mpirun: mpi.Mpirun
    numactl: str | None = None
    start_timeout_s: float = 600.0
    """Seconds that a world may take to load, and a rank to read its weights again."""
    fleet: Fleet | None = None
    """The hosts of ranks on several; None for ranks on this host."""
    replica: int | None = None
    """The index among the cluster's replicas; None for the only world."""

    @property
    def title(self) -> str:
        """The name for log lines."""
        return "the cluster" if self.replica is None else f"replica {self.replica}"

    @property
    def name(self) -> str:
        """The prefix of log lines that are about its ranks."""
        return "" if self.replica is None else f"replica {self.replica}: "


@dataclass(frozen=True)
class Death:
    """The cause of a world's end. `error` is the error of a rank that ended by itself (a bad checkpoint stays one)."""

    cause: str
    error: AllspanError | None = None


class WorldProcess:
    """The processes of one world: start it once, wait for it, end it.

    Used by one thread, which must outlive it (the kernel kills it otherwise)."""

    def __init__(self, plan: WorldPlan, run: RunDir, epoch: int) -> None:
        self.epoch = epoch
        self._plan = plan
        self._run = run
        self._ranks: dict[int, tuple[cluster_file.RankInfo, int]] = {}
        self._tail = bytearray()
        self._received = 0
        self._lost: Lost | None = None
        self._oom = OomWatch()
        self.weights = FileChanges(Path(plan.config.model.path))
        limit_s = plan.config.service.watchdog_timeout
        self._watchdog = Watchdog(run.path, epoch, limit_s, plan.start_timeout_s, plan.name)
        self._process = self._start()
        self._mpirun_fd = os.pidfd_open(self._process.pid)
        self._reader = threading.Thread(target=self._forward_output, name="mpirun-output", daemon=True)
        self._reader.start()

    @property
    def ranks(self) -> tuple[cluster_file.RankInfo, ...]:
        return tuple(info for _, (info, _) in sorted(self._ranks.items()))

    @property
    def num_ranks(self) -> int:
        return len(self._plan.placement.ranks)

    def info(self) -> cluster_file.ClusterInfo | None:
        """Returns the state that the leader published, once every rank of this epoch is ready."""
        try:
            info = cluster_file.read_cluster(self._run.path)
        except ConfigError:
            return None
        return info if info.epoch == self.epoch and info.state == "ready" else None

    def wait(self, stop_fds: list[int], done: Callable[[], bool] | None = None, timeout_s: float | None = None) -> str:
        """Waits for "stop" (one of `stop_fds` is readable), "died" (mpirun or a rank ended, or was silent or stuck
        for too long), "done" or "timeout"."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._find_ranks()
            if done is not None and done():
                return "done"
            poller = select.poll()
            for fd in (*stop_fds, self._mpirun_fd, *(fd for _, fd in self._ranks.values())):
                poller.register(fd, select.POLLIN)
            # No event announces a new file: look every 50 ms until all ranks are known and `done`.
            partial = done is not None or len(self._ranks) < self.num_ranks
            ready = {fd for fd, _ in poller.poll(50 if partial else LOOK_S * 1000)}
            if ready.intersection(stop_fds):
                return "stop"
            if not ready:
                self._look()
            if ready or self._lost is not None:
                return "died"
            if deadline is not None and time.monotonic() > deadline:
                return "timeout"

    def _look(self) -> None:
        self._lost = self._watchdog.look(self.ranks)
        for info in self.ranks:
            self._oom.note(info.pid)

    def death(self) -> Death:
        """Finds out why the world ended: from mpirun's message, the ranks' error files and the order of their ends.
        Takes up to 1.5 s; of a world that hangs, all stacks are in the log first, which takes up to 4 s."""
        if self._lost is not None:
            stacks.dump([self._ranks[rank] for rank in sorted(self._ranks)], lambda: self._received, self._plan.name)
            return Death(f"{self._name(self._lost.rank)} {self._lost.words}")
        first = [info for info, fd in self._ranks.values() if _ended(fd)]
        deadline = time.monotonic() + CAUSE_WAIT_S
        while time.monotonic() < deadline:
            told = mpi_notices.find_death(self._output())
            words = self._rank_errors()
            if told or (self._process.poll() is not None and (words or self._process.returncode < 0)):
                break
            time.sleep(0.02)
        if told is not None:
            # Open MPI 4 tells the rank, and 0 for its process; MPICH the process, and no rank.
            info = next((info for info in self.ranks if info.pid == told.pid or info.rank == told.rank), None)
            rank, pid = (told.rank, told.pid) if info is None else (info.rank, info.pid)
            said = f"; its exit report: {words[rank].message}" if rank in words else ""
            by = self._signal_text(told.signal, pid)
            return Death(f"rank {rank} (pid {pid} on {told.host}) was killed by {by}{said}")
        if words:
            victim = min(words, key=lambda rank: self._error_time(rank))
            return Death(f"{self._name(victim)}: {words[victim].message}", words[victim])
        if (code := self._process.poll()) is not None and code < 0:
            by = self._signal_text(-code, self._process.pid)
            return Death(f"mpirun (pid {self._process.pid}) was killed by {by}")
        if first:
            why = self._oom.suspicion(first[0].pid)
            return Death(f"{self._name(first[0].rank)} ended unexpectedly{f', {why}' if why else ''}")
        return Death(f"mpirun (pid {self._process.pid}) ended with code {code}: {self._last_line()}")

    def end(self, drain_s: float | None) -> None:
        """Ends every process of the world and removes MPI's files: at once (None), or in order, with `drain_s` seconds
        for requests that run and END_GRACE_S for the rest."""
        if drain_s:
            self._ask_to_end(signal.SIGTERM, drain_s)
        if drain_s is not None:
            self._ask_to_end(signal.SIGINT, END_GRACE_S)
        if self._process.poll() is None:
            self._process.kill()
        reaper.kill(str(self._run.path))
        self._process.wait(5.0)
        self._reader.join(2.0)
        os.close(self._mpirun_fd)
        for _, fd in self._ranks.values():
            os.close(fd)
        self._ranks.clear()
        for pattern in (f"*.e{self.epoch}.*", f"*.e{self.epoch}"):
            for path in self._run.path.glob(pattern):
                path.unlink(missing_ok=True)
        self._run.clear_shm()

    def _ask_to_end(self, number: int, limit_s: float) -> None:
        """A rank answers SIGTERM by draining, SIGINT by failing what is open."""
        for _, fd in self._ranks.values():
            with suppress(ProcessLookupError):  # it has ended; its number may be another process's by now
                signal.pidfd_send_signal(fd, number)
        with suppress(subprocess.TimeoutExpired):  # then it is asked otherwise
            self._process.wait(limit_s)

    def _start(self) -> subprocess.Popen[bytes]:
        plan, folder = self._plan, self._run.path
        paths = []
        for place in plan.placement.ranks:
            config = replace(
                plan.config,
                service=replace(plan.config.service, epoch=self.epoch),
                parallel=replace(
                    plan.config.parallel,
                    threads=place.threads,
                    cpus=place.cpus,
                    memory_node=-1 if plan.numactl or place.node is None else place.node,
                    ranks_on_node=place.sharing,
                ),
            )
            paths.append(folder / f"worker-{place.rank}.e{self.epoch}.json")
            cluster_file.write_atomically(paths[-1], json.dumps(asdict(config), indent=1))
        words = mpi.command(plan.mpirun, plan.placement, paths, plan.numactl)
        command = [sys.executable, "-S", "-E", str(Path(die_with_parent.__file__)), str(os.getpid()), *words]
        return subprocess.Popen(
            command,
            env=mpi.environment(plan.mpirun, self._run.shm, plan.placement, mpi.outside_slurm()),
            cwd=None if _has_working_dir() else self._run.path,  # mpirun does not start without one
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to handle
        )

    def _forward_output(self) -> None:
        assert self._process.stdout is not None
        notices, foreign = NoticeFilter(), ForeignLines("ranks") if logs.is_json() else None
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), 65536):
                self._tail += data
                self._received += len(data)
                del self._tail[:-TAIL_BYTES]
                self._show(notices.pass_on(data), foreign)
            self._show(notices.rest(), foreign)

    def _show(self, lines: bytes, foreign: ForeignLines | None) -> None:
        # A log that cannot be written (full disk, closed pipe) is no reason for the ranks to stop.
        with suppress(OSError):
            sys.stderr.buffer.write(foreign.pass_on(lines) if foreign else lines)
            sys.stderr.flush()

    def _output(self) -> str:
        return bytes(self._tail).decode(errors="replace")

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._output().splitlines() if line.strip(" -\t")]
        return lines[-1] if lines else "it said nothing"

    def _find_ranks(self) -> None:
        for rank in range(self.num_ranks):
            if rank in self._ranks or (info := cluster_file.read_rank(self._run.path, rank, self.epoch)) is None:
                continue
            with suppress(ProcessLookupError):  # it ended before it was found: mpirun ends, too
                self._ranks[rank] = (info, os.pidfd_open(info.pid))

    def _signal_text(self, number: int, pid: int) -> str:
        text = f"signal {number} ({signal_name(number)})"
        if number == signal.SIGKILL and (why := self._oom.suspicion(pid)):
            return f"SIGKILL, {why}"
        if number != signal.SIGBUS:
            return text
        if changed := self.weights.first():
            return f"{text}: {changed}"
        memory = self._run.shm.parent
        free = size(shutil.disk_usage(memory).free)
        return f"{text}: is {memory} full? {free} are free now; docker run --shm-size=1g gives a container more"

    def _rank_errors(self) -> dict[int, AllspanError]:
        """Reads the ranks' error files."""
        words = {}
        for rank in range(self.num_ranks):
            try:
                text = cluster_file.error_file(self._run.path, rank, self.epoch).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text:
                words[rank] = error_of(text)
        return words

    def _error_time(self, rank: int) -> float:
        return cluster_file.error_file(self._run.path, rank, self.epoch).stat().st_mtime

    def _name(self, rank: int) -> str:
        info = self._ranks[rank][0] if rank in self._ranks else None
        return f"rank {rank} (pid {info.pid} on {info.host})" if info else f"rank {rank}"


def error_of(report: str) -> AllspanError:
    """Returns the error of a rank's exit report: one line, then a traceback that ends with the error's class."""
    kinds = re.findall(rf"^{re.escape(errors.__name__)}\.(\w+)", report, re.MULTILINE)
    kind: type[AllspanError] = getattr(errors, kinds[-1], InternalError) if kinds else InternalError
    return kind(report.strip().splitlines()[0])


def is_readable(fds: Iterable[int], timeout_s: float) -> bool:
    """Returns whether any descriptor is readable within `timeout_s`; descriptors above select's limit of 1023 are
    fine."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _has_working_dir() -> bool:
    """Returns whether this process's working directory still exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _ended(pidfd: int) -> bool:
    return is_readable([pidfd], 0.0)


def signal_name(number: int) -> str:
    """Returns the name of a signal, "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
