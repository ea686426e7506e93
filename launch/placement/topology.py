"""The parts of this machine that a rank can be placed on: NUMA nodes, physical cores, memory (`gpus` knows GPUs).

Only what this process may use counts: its CPU affinity, its allowed memory nodes and its cgroup's CPU quota.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """One NUMA node. `cores` are the allowed hardware threads of each physical core. Memory in bytes, available now."""

    index: int
    cores: tuple[tuple[int, ...], ...]
    memory_available: int = 0

    @property
    def processors(self) -> tuple[int, ...]:
        """Returns one hardware thread of every core first, then their siblings."""
        most = max((len(core) for core in self.cores), default=0)
        return tuple(core[i] for i in range(most) for core in self.cores if i < len(core))


@dataclass(frozen=True)
class Topology:
    """`cpu_limit`: how many processors' time the cgroup grants, None without a quota."""

    nodes: tuple[Node, ...]
    cpu_limit: float | None = None

    @property
    def num_cores(self) -> int:
        """Number of physical cores that may be used at once, at least 1."""
        cores = sum(len(node.cores) for node in self.nodes)
        return max(1, min(cores, int(self.cpu_limit)) if self.cpu_limit else cores)

    @property
    def num_processors(self) -> int:
        """Number of hardware threads that may be used at once, at least 1."""
        count = sum(len(node.processors) for node in self.nodes)
        return max(1, min(count, int(self.cpu_limit)) if self.cpu_limit else count)


def parse_list(text: str) -> tuple[int, ...]:
    """The kernel's list format, "0-3,8,10-11", sorted. Raises ValueError."""
    values: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            values.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(values))


def read_topology(
    sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc"), allowed: Iterable[int] | None = None
) -> Topology:
    """The machine under `sys_root`, cut down to the processors `allowed` (this process's affinity by default)."""
    cpus = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    memory_nodes = _allowed_memory_nodes(proc_root)
    nodes = []
    for folder in sorted((sys_root / "devices/system/node").glob("node[0-9]*"), key=_node_index):
        index = _node_index(folder)
        mine = [cpu for cpu in parse_list((folder / "cpulist").read_text()) if cpu in cpus]
        if mine and (memory_nodes is None or index in memory_nodes):
            nodes.append(Node(index, _cores(sys_root, mine), _node_memory(folder)))
    if not nodes:
        nodes = [Node(0, _cores(sys_root, sorted(cpus)), available_memory(proc_root))]
    if len(nodes) == 1:
        nodes = [Node(nodes[0].index, nodes[0].cores, available_memory(proc_root) or nodes[0].memory_available)]
    return Topology(tuple(nodes), cpu_quota(sys_root, proc_root))


def available_memory(proc_root: Path = Path("/proc")) -> int:
    """Bytes that can be had without swapping; 0 when the system does not say."""
    return _meminfo(proc_root / "meminfo").get("MemAvailable", 0)


def cpu_quota(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> float | None:
    """Returns the processors' worth of time that this process's cgroup and those around it allow; None without a
    limit."""
    quotas = [_quota(folder) for folder in _cpu_cgroups(sys_root / "fs/cgroup", proc_root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cpu_cgroups(root: Path, proc_root: Path) -> set[Path]:
    """Folders of this process's cgroup and those around it, of version 2 and 1. A container often sees its own as the
    root, under whatever name it has outside: folders that are not there limit nothing."""
    folders = {root, root / "cpu"}
    try:
        lines = (proc_root / "self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "cpu" if controllers else root
        for name in path.strip("/").split("/"):
            folder /= name
            folders.add(folder)
    return folders


def _quota(folder: Path) -> float | None:
    """Returns the CPU quota of one cgroup (version 2, then 1)."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass  # no cgroup of version 2 here
    try:
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def _node_index(folder: Path) -> int:
    return int(folder.name.removeprefix("node"))


def _cores(sys_root: Path, cpus: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Groups hardware threads by physical core, in the order of their first thread."""
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in cpus:
        folder = sys_root / f"devices/system/cpu/cpu{cpu}/topology"
        try:
            key = ((folder / "physical_package_id").read_text().strip(), (folder / "core_id").read_text().strip())
            siblings = (folder / "thread_siblings_list").read_text().strip()
            key = (key[0], f"{key[1]}:{siblings}")
        except OSError:
            key = ("cpu", str(cpu))
        cores.setdefault(key, []).append(cpu)
    return tuple(tuple(threads) for threads in cores.values())


def _meminfo(path: Path) -> dict[str, int]:
    values: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return values
    for line in lines:
        name, _, rest = line.rpartition(":")
        number = rest.split()
        if number and number[0].isdigit():
            values[name.split()[-1]] = int(number[0]) << 10
    return values


def _node_memory(folder: Path) -> int:
    """Returns the free memory and the part of the page cache that can be freed."""
    values = _meminfo(folder / "meminfo")
    return values.get("MemFree", 0) + values.get("FilePages", 0) + values.get("SReclaimable", 0)


def _allowed_memory_nodes(proc_root: Path) -> frozenset[int] | None:
    try:
        for line in (proc_root / "self/status").read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                return frozenset(parse_list(line.partition(":")[2]))
    except OSError:
        pass  # not a Linux /proc: every node counts
    return None
