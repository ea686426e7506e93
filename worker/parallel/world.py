"""Joins this process to its world: starts MPI, picks the collectives, and ends all ranks together when one fails.

A world of one rank needs no MPI at all and never loads it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import ParallelConfig
from allspan.worker.parallel.base import Collectives, PlanChannel
from allspan.worker.parallel.hosts import (
    HostCollectives,
    HostPlanChannel,
    HostSums,
    SplitHosts,
    by_shared_memory,
    find_hosts,
)
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.parallel.window import (
    PLAN_SPIN_S,
    SPINS,
    SharedMemory,
    WindowCollectives,
    WindowPlanChannel,
    bytes_needed,
    load_native,
)
from allspan.worker.process.host import place

DeviceCollectives = Callable[
    [Collectives, Callable[[bytes], list[bytes]], float, Callable[[], bool]], tuple[Collectives, str, str]
]
"""See `allspan.worker.step.backend.Backend.collectives`."""

_GATHER_BYTES = 1024
_ABORT_TIMEOUT_S = 3.0
_LOAD_TIMEOUT_S = 3600.0
"""Ranks may read their weights at very different speeds; that a peer died meanwhile is mpirun's to notice."""
_SEPARATE = (
    "{started} started {tasks} ranks, but MPI joins none of them: each would serve the whole model alone. Start them "
    "with `srun --mpi=pmix` (`srun --mpi=list` says whether this Slurm has it) or with the mpirun of the MPI library "
    "that mpi4py loads; for one rank alone use `srun -n 1`"
)


class World(Protocol):
    """All ranks of a world. `groups` names the collectives of each kind of parallelism ("tp", "ep", "dp"); in a
    pipeline they are of this rank's stage, with the way to the others among their capabilities."""

    rank: int
    size: int
    kind: str
    """The kind of collectives: "local"; "window", "hosts" (windows, and MPI between them) or "mpi"; on GPUs "ipc",
    "nccl" or "staged"."""
    groups: dict[str, Collectives]
    channel: PlanChannel | None

    def all_values(self, value: int) -> tuple[int, ...]:
        """Every rank's value, in rank order, on every rank. 64 bits."""

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's data (at most 1 KiB, no zero byte at its end) on rank 0, in rank order; nothing elsewhere."""

    def barrier(self) -> None: ...

    def abort(self, code: int) -> NoReturn:
        """Ends every rank of the world at once."""

    def close(self) -> None:
        """The orderly end; every rank calls it."""


def join_world(
    config: ParallelConfig, on_device: DeviceCollectives | None = None, split: SplitHosts = by_shared_memory
) -> World:
    """`on_device` makes the collectives of a device from those of host memory; None: tensors lie in host memory.
    ConfigError when "window" is asked for and cannot be had, or when Slurm started several tasks that MPI does not
    join. `split` finds the ranks of a host."""
    ranks = place()
    if ranks is None:
        _refuse_separate_tasks()
    if ranks is None or ranks[1] == 1:
        return LocalWorld()
    if config.pipeline_parallel_size > 1:
        mpi = _start_mpi()  # before anything else imports it
        from allspan.worker.parallel.pipeline import PipelineWorld

        return PipelineWorld(config, on_device, mpi, split)
    return MpiWorld(config, on_device, split)


class LocalWorld:
    """A world of this process alone."""

    rank = 0
    size = 1
    kind = "local"
    channel: PlanChannel | None = None

    def __init__(self) -> None:
        self.groups: dict[str, Collectives] = _groups(LocalCollectives())

    def all_values(self, value: int) -> tuple[int, ...]:
        return (value,)

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        pass

    def abort(self, code: int) -> NoReturn:
        _flush()
        os._exit(code)

    def close(self) -> None:
        pass


class MpiWorld:
    """The ranks that one mpirun started. Only the main thread may use it."""

    def __init__(
        self,
        config: ParallelConfig,
        on_device: DeviceCollectives | None,
        split: SplitHosts = by_shared_memory,
        comm: Any = None,
    ) -> None:
        """`comm` None: all of them."""
        self._mpi = _start_mpi()
        self._comm = comm if comm is not None else self._mpi.COMM_WORLD
        self._config = config
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        if self.size == 1:  # its launcher started several
            raise ConfigError(_SEPARATE.format(started="The launcher", tasks=(place() or (0, 0))[1]))
        self._threads = self.all_values(config.threads)
        self._hosts = find_hosts(self._mpi, self._comm, self.all_values, split)
        native, why_not = self._native()
        if (native is None or len(self._hosts.ranks) > 1) and config.collectives == "window":
            why_not = why_not or "the ranks are on several hosts"
            raise ConfigError(f'collectives is "window", but {why_not}; use "auto" or "mpi"')
        if why_not and self.rank == 0:
            print(f"allspan: collectives go through MPI: {why_not}", file=sys.stderr, flush=True)
        self.kind = "mpi" if native is None else "window" if len(self._hosts.ranks) == 1 else "hosts"
        collectives: Collectives
        self.channel: PlanChannel | None
        make = {"mpi": self._mpi_pair, "window": self._window_pair, "hosts": self._hosts_pair}[self.kind]
        collectives, self.channel = make(native)
        self.groups = _groups(collectives if on_device is None else self._on_device(collectives, on_device))

    def all_values(self, value: int) -> tuple[int, ...]:
        mine, everyone = np.array([value], dtype=np.int64), np.empty(self.size, dtype=np.int64)
        kind = self._mpi.INT64_T
        self._wait(self._comm.Iallgather([mine, kind], [everyone, kind]), "all_values")
        return tuple(everyone.tolist())

    def gather(self, data: bytes) -> list[bytes]:
        if len(data) > _GATHER_BYTES:
            raise ConfigError(f"rank {self.rank} has {len(data)} bytes to send, at most {_GATHER_BYTES}: {data[:80]!r}")
        mine = np.frombuffer(data.ljust(_GATHER_BYTES, b"\0"), dtype=np.uint8).copy()
        everyone = np.empty(self.size * _GATHER_BYTES if self.rank == 0 else 0, dtype=np.uint8)
        self._wait(self._comm.Igather([mine, self._mpi.BYTE], [everyone, self._mpi.BYTE], root=0), "gather")
        return [part.tobytes().rstrip(b"\0") for part in everyone.reshape(-1, _GATHER_BYTES)]

    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier(), "barrier")

    def abort(self, code: int) -> NoReturn:
        _flush()
        # mpirun may be unable to listen; its peers then end with mpirun.
        threading.Timer(_ABORT_TIMEOUT_S, os._exit, (code,)).start()
        self._comm.Abort(code)
        os._exit(code)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.groups["tp"].close()
        self._mpi.Finalize()

    def _native(self) -> tuple[Any, str]:
        """The compiled collectives; or None, and why they are not used where nobody asked for that."""
        native = load_native()
        if self._config.collectives == "mpi":
            return None, ""
        if not all(self.all_values(int(native is not None))):
            return None, "the compiled kernels are not installed"
        if not self._hosts.is_in_order:
            return None, "the ranks of a host do not follow one another"
        return native, ""

    def _shared_memory(self, native: Any) -> SharedMemory:
        """Memory that the ranks of this host share."""
        host = self._hosts.comm
        needed, zeroed = bytes_needed(native, host.size, self._fewest_threads)
        window = self._mpi.Win.Allocate_shared(needed + 64 if host.rank == 0 else 0, 1, comm=host)
        buffer, _ = window.Shared_query(0)
        offset = -buffer.address % 64
        if host.rank == 0:
            buffer[offset : offset + zeroed] = bytes(zeroed)
        self._wait(host.Ibarrier(), "shared memory")

        def free() -> None:
            window.Free()
            host.Free()

        return SharedMemory(buffer.address + offset, host.rank, host.size, free, self._hosts.ranks[self._hosts.mine][0])

    @property
    def _fewest_threads(self) -> int:
        """The smallest number of threads of the ranks of this host."""
        return min(self._threads[rank] for rank in self._hosts.ranks[self._hosts.mine])

    @property
    def _is_crowded(self) -> bool:
        """Whether this host's ranks have more threads than it has processors."""
        threads = sum(self._threads[rank] for rank in self._hosts.ranks[self._hosts.mine])
        return self._config.oversubscribed or threads > (os.cpu_count() or 1)

    def _window_pair(self, native: Any) -> tuple[WindowCollectives, PlanChannel]:
        memory, timeout = self._shared_memory(native), self._config.timeout_s
        return (
            WindowCollectives(native, memory, self._fewest_threads, 0 if self._is_crowded else SPINS, timeout),
            WindowPlanChannel(native, memory, 0.0 if self._is_crowded else PLAN_SPIN_S, timeout),
        )

    def _hosts_pair(self, native: Any) -> tuple[Collectives, PlanChannel]:
        from allspan.worker.parallel.mpi import MpiCollectives, MpiPlanChannel

        timeout, hosts = self._config.timeout_s, self._hosts
        is_first = hosts.comm.rank == 0
        window, within = self._window_pair(native) if hosts.comm.size > 1 else (None, None)
        firsts = self._comm.Split(0 if is_first else self._mpi.UNDEFINED, self.rank)
        between = MpiPlanChannel(firsts, timeout) if is_first else None
        spins = 0 if self._is_crowded else SPINS
        sums = HostSums(native, self._mpi, self._comm.Dup(), hosts, window, spins, timeout)
        return HostCollectives(sums, MpiCollectives(self._comm.Dup(), timeout)), HostPlanChannel(between, within)

    def _on_device(self, host: Collectives, on_device: DeviceCollectives) -> Collectives:
        collectives, kind, note = on_device(host, self._share, self._config.timeout_s, self._on_several_hosts)
        self.kind = kind or self.kind
        if note and self.rank == 0:
            print(f"allspan: {note}", file=sys.stderr, flush=True)
        return collectives

    def _on_several_hosts(self) -> bool:
        return len(self._hosts.ranks) > 1

    def _share(self, data: bytes) -> list[bytes]:
        """Every rank's data, in rank order, on every rank; as for `gather`."""
        mine = np.frombuffer(data.ljust(_GATHER_BYTES, b"\0"), dtype=np.uint8).copy()
        everyone = np.empty(self.size * _GATHER_BYTES, dtype=np.uint8)
        self._wait(self._comm.Iallgather([mine, self._mpi.BYTE], [everyone, self._mpi.BYTE]), "share")
        return [part.tobytes().rstrip(b"\0") for part in everyone.reshape(-1, _GATHER_BYTES)]

    def _mpi_pair(self, _: Any) -> tuple[Collectives, PlanChannel]:
        from allspan.worker.parallel.mpi import MpiCollectives, MpiPlanChannel

        timeout = self._config.timeout_s
        return MpiCollectives(self._comm.Dup(), timeout), MpiPlanChannel(self._comm.Dup(), timeout)

    def _wait(self, request: Any, what: str) -> None:
        from allspan.worker.parallel.mpi import wait

        wait(request, _LOAD_TIMEOUT_S, what, self._comm)


def _start_mpi() -> Any:
    """MPI, for calls from the main thread alone. A process that fails must not wait for its peers in MPI_Finalize."""
    import mpi4py

    # UCX's one-sided component prints errors where it has no device, and takes seconds to start on some hosts; windows
    # here are in shared memory. `allspan serve` says the same to mpirun.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    return MPI


def _refuse_separate_tasks() -> None:
    """Raises ConfigError for one of several tasks that srun started without MPI, each of them a world of its own."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        raise ConfigError(_SEPARATE.format(started="Slurm", tasks=f"{tasks} (SLURM_NTASKS)"))


def _groups(collectives: Collectives) -> dict[str, Collectives]:
    return dict.fromkeys(("tp", "ep", "dp"), collectives)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
