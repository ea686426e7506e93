"""Memory that this process may still take, as the kernel tells it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def available_bytes(cpus: Sequence[int] = (), root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: of the NUMA nodes that hold `cpus` (none: the whole host), and no more
    than the control group leaves. Page cache counts as available. `root` stands for "/" in tests."""
    whole = _meminfo(root / "proc/meminfo").get("MemAvailable", 0)
    nodes = [node for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*")) if _holds(node, cpus)]
    if cpus and nodes:
        whole = min(whole, sum(_node_bytes(node) for node in nodes))
    limits = [left for group in _groups(root) if (left := _group_bytes(group)) is not None]
    return min(whole, *limits) if limits else whole


def _meminfo(path: Path) -> dict[str, int]:
    """Name → bytes. The lines of a node's file start with "Node N"."""
    if not path.exists():
        return {}
    lines = re.findall(r"^(?:Node \d+ )?(\w+(?:\(\w+\))?):\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in lines}


def _node_bytes(node: Path) -> int:
    info = _meminfo(node / "meminfo")
    cached = info.get("FilePages", 0) - info.get("Shmem", 0) + info.get("SReclaimable", 0)
    return info.get("MemFree", 0) + max(cached, 0)


def _holds(node: Path, cpus: Sequence[int]) -> bool:
    text = (node / "cpulist").read_text().strip() if (node / "cpulist").exists() else ""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if any(int(first) <= cpu <= int(last or first) for cpu in cpus):
            return True
    return False


def _groups(root: Path) -> list[Path]:
    """The memory controller's groups that this process is in, the innermost first (version 2, then 1). In a container
    their paths may not be visible; the mounted root is the container's own then."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = mount / path.strip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
    return list(dict.fromkeys([*folders, root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]))


def _group_bytes(group: Path) -> int | None:
    """What a control group (version 2 or 1) leaves; None: no limit."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for limit, usage in names:
        text, used = _read(group / limit).strip(), _read(group / usage).strip()
        if not text or not used or text == "max" or int(text) >= 2**60:
            continue
        found = re.search(r"^(?:total_)?inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
        reclaimable = int(found.group(1)) if found else 0
        return max(int(text) - int(used) + reclaimable, 0)
    return None


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
