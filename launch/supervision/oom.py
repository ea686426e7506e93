"""Detects whether the kernel killed a rank for lack of memory, from the counters of the rank's control groups.

Version 1: memory.oom_control, memory.usage_in_bytes, memory.limit_in_bytes; version 2: memory.events, memory.current,
memory.max (the kernel's admin guide, cgroup-v1/memory and cgroup-v2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

_NO_LIMIT = 1 << 60
_FILES = {
    1: ("memory.oom_control", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes"),
    2: ("memory.events", "memory.current", "memory.peak", "memory.max"),
}
FULL = 0.98
"""Fraction of the memory limit above which a SIGKILL is attributed to the kernel even where it counts no kill."""


@dataclass
class OomWatch:
    """Watches ranks for out-of-memory kills: call `note` for each rank regularly while it runs, and `suspicion` after
    its end."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    _memberships: dict[int, str] = field(default_factory=dict)
    _groups: dict[int, dict[Path, int]] = field(default_factory=dict)
    """The earlier counters of each control group that a process has been in (its own and their ancestors), by pid."""

    def note(self, pid: int) -> None:
        """Remembers the groups that a process is in, and their counts when it was first seen there."""
        try:
            membership = (self.proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return  # it is gone
        if self._memberships.get(pid) != membership:
            self._memberships[pid] = membership
            # Earlier groups stay: one that is dying is moved to the root before it is gone.
            groups = self._groups.setdefault(pid, {})
            groups |= {group: _kills(group) for group in self._folders(membership) if group not in groups}

    def suspicion(self, pid: int) -> str:
        """ "likely out of memory (cgroup 31.9/32 GiB)", or "" when nothing points to that."""
        groups = self._groups.get(pid, {})
        counted = any(_kills(group) > before for group, before in groups.items())
        full = any(_usage(group) >= FULL * _limit(group) and not _counts(group) for group in groups)
        if not (counted or full):
            return ""
        # Version 1 counts in the victim's own group, whatever the group whose limit it was.
        fullest = max(groups, key=lambda group: _usage(group, peak=counted) / _limit(group))
        used, limit = _usage(fullest, peak=counted), _limit(fullest)
        if limit >= _NO_LIMIT:
            return f"likely out of memory (cgroup {_amounts(used, used)[1]}, without a limit of its own)"
        return f"likely out of memory (cgroup {'/'.join(_amounts(used, limit))})"

    def _folders(self, membership: str) -> list[Path]:
        """The memory controller's folders of a process, its own first. In a container its path may not be visible."""
        root, path = self.cgroups, ""
        for line in membership.splitlines():
            _, _, rest = line.partition(":")
            controllers, _, where = rest.partition(":")
            if "memory" in controllers.split(","):
                root, path = self.cgroups / "memory", where
                break
            if controllers == "":
                path = where
        own = root / path.strip("/")
        folders = [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
        return [folder for folder in folders if _version(folder)]


def _version(group: Path) -> int:
    """0: no group of the memory controller."""
    return next((version for version, names in _FILES.items() if (group / names[1]).is_file()), 0)


def _counts(group: Path) -> bool:
    """Returns whether the kernel counts its kills here (old ones of version 1 do not)."""
    return any(line.startswith("oom_kill ") for line in _read(group, 0).splitlines())


def _kills(group: Path) -> int:
    return sum(int(line.split()[1]) for line in _read(group, 0).splitlines() if line.startswith("oom_kill "))


def _usage(group: Path, peak: bool = False) -> int:
    """Bytes; with `peak` the most there has been, for what was freed by the kill."""
    return max(_number(group, 1), _number(group, 2) if peak else 0)


def _limit(group: Path) -> int:
    return _number(group, 3) or _NO_LIMIT


def _number(group: Path, index: int) -> int:
    """0 for "max" and for a file that is not there."""
    text = _read(group, index).strip()
    return int(text) if text.isdigit() else 0


def _read(group: Path, index: int) -> str:
    version = _version(group)
    try:
        return (group / _FILES[version][index]).read_text(encoding="utf-8") if version else ""
    except OSError:
        return ""


def _amounts(used: int, limit: int) -> tuple[str, str]:
    """("31.9", "32 GiB"): three digits each, in the limit's unit."""
    unit, name = (1 << 30, "GiB") if limit >> 30 else (1 << 20, "MiB")
    return f"{min(used, limit) / unit:.3g}", f"{limit / unit:.3g} {name}"
