"""What a rank asks of its operating system: to end with its parent, to run where it was placed; and its exit report."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from allspan.protos.api.errors import AllspanError, Unavailable
from allspan.protos.cluster.cluster_file import write_atomically

_PR_SET_PDEATHSIG = 1
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call."""
_POLL_S = 0.5
_PLACES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
"""Variables of Open MPI, MPICH and Slurm that give a process its rank and the number of ranks."""


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Returns (rank, size), which mpirun gave to this process before MPI starts; None when no mpirun started it."""
    for rank, size in _PLACES:
        if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
            return int(environment[rank]), int(environment[size])
    return None


def host_name() -> str:
    return socket.gethostname()


def peak_rss_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """The memory that this process holds now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def die_with_parent() -> None:
    """The kernel kills this process when its parent (mpirun) ends, however it ends. Linux only; elsewhere mpirun's own
    clean-up must do. Raises Unavailable when the parent is gone already."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise Unavailable(f"the parent process {parent} ended while this rank started")


def watch_process(pid: int, on_gone: Callable[[], None]) -> None:
    """Calls `on_gone`, from a thread, once process `pid` has ended."""

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):  # gone: what was waited for
            _wait_for_end(pid)
        on_gone()

    threading.Thread(target=wait, name="supervisor-watch", daemon=True).start()


def _wait_for_end(pid: int) -> None:
    """Returns, or raises ProcessLookupError, once the process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # a system, kernel or sandbox without such handles
        while True:
            os.kill(pid, 0)
            time.sleep(_POLL_S)
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll()
    os.close(handle)


def allowed_cpus() -> tuple[int, ...]:
    """Processors that the calling thread may run on; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def run_on(cpus: Sequence[int]) -> None:
    """Confines the calling thread, and those that it starts from now on, to `cpus`; empty: leaves it where it is."""
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def bind_memory(node: int) -> None:
    """Memory that the calling thread takes from now on, and threads that it starts, lies on NUMA node `node`. Raises
    Unavailable where the system does not allow it (in a container: without SYS_NICE)."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None or not sys.platform.startswith("linux"):
        raise Unavailable(f"how to bind memory on {sys.platform} {platform.machine()} is not known")
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // word + 1))()
    mask[node // word] = 1 << node % word
    # The kernel reads one bit less than its argument says.
    if ctypes.CDLL(None, use_errno=True).syscall(call, _MPOL_BIND, mask, ctypes.c_ulong(len(mask) * word + 1)):
        raise Unavailable(os.strerror(ctypes.get_errno()))


def memory_nodes(cpus: Iterable[int], root: Path = Path("/")) -> tuple[str, ...]:
    """Names of the NUMA nodes of `cpus`, sorted; empty: the whole host."""
    nodes = root / "sys/devices/system/node"
    return tuple(sorted({path.parent.name for cpu in cpus for path in nodes.glob(f"node*/cpu{cpu}")}))


class ExitReport:
    """Why a rank ended: a line for people on standard error, and in a file for the supervisor, then the traceback. Only
    the first error is reported: what fails after it follows from it."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._is_written = False

    def write(self, error: BaseException) -> None:
        """On standard error an AllspanError is one line (an operator can mend it); anything else has its traceback."""
        if self._is_written:
            return
        self._is_written = True
        line = f"{type(error).__name__}: {error}" if not isinstance(error, AllspanError) else error.message
        line = " ".join(line.split())
        trace = "".join(traceback.format_exception(error))
        if not isinstance(error, AllspanError):
            sys.stderr.write(trace)
        print(f"allspan.worker: rank {self._rank}: {line}", file=sys.stderr, flush=True)
        try:
            write_atomically(self._path, f"{line}\n{trace}")
        except OSError as failure:
            print(f"allspan.worker: cannot write {self._path}: {failure}", file=sys.stderr, flush=True)
