"""Whether a SIGKILL was the kernel's, from control groups that are files of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.launch.supervision.oom import OomWatch

PID = 4242
GIB = 1 << 30


class Machine:
    """A /proc and a /sys/fs/cgroup with one process, in the group a/b."""

    def __init__(self, root: Path, version: int) -> None:
        self.version = version
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / str(PID)).mkdir(parents=True)
        self.memory = self.cgroups / "memory" if version == 1 else self.cgroups
        self.join("a/b")
        for group in ("", "a", "a/b"):
            self.write(group, kills=3, used=GIB, limit=0)
        self.watch = OomWatch(self.proc, self.cgroups)

    def join(self, group: str) -> None:
        line = f"4:memory:/{group}\n0::/unrelated\n" if self.version == 1 else f"0::/{group}\n"
        (self.proc / str(PID) / "cgroup").write_text(f"1:cpu:/\n{line}" if self.version == 1 else line)

    def write(self, group: str, kills: int | None, used: int, limit: int, peak: int = 0) -> None:
        folder = self.memory / group
        folder.mkdir(parents=True, exist_ok=True)
        counts = "low 0\n" if kills is None else f"low 0\noom_kill {kills}\n"
        names = ("events", "current", "peak", "max")
        if self.version == 1:
            names = ("oom_control", "usage_in_bytes", "max_usage_in_bytes", "limit_in_bytes")
        no_limit = "max" if self.version == 2 else str(2**63 - 4096)
        for name, value in zip(names, (counts, used, peak or used, limit or no_limit), strict=True):
            (folder / f"memory.{name}").write_text(str(value))


@pytest.fixture(params=[1, 2])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, request.param)


def test_a_kill_that_was_counted_is_told_with_the_groups_memory(machine: Machine) -> None:
    machine.write("a/b", kills=3, used=30 * GIB, limit=32 * GIB)
    machine.watch.note(PID)
    machine.write("a/b", kills=4, used=GIB, limit=32 * GIB, peak=32 * GIB - GIB // 10)
    assert machine.watch.suspicion(PID) == "likely out of memory (cgroup 31.9/32 GiB)"


def test_an_outer_groups_limit_counts(machine: Machine) -> None:
    machine.watch.note(PID)
    machine.write("a/b", kills=4, used=GIB, limit=0)
    machine.write("a", kills=4 if machine.version == 2 else 3, used=500 << 20, limit=512 << 20)
    assert machine.watch.suspicion(PID) == "likely out of memory (cgroup 500/512 MiB)"


def test_a_machine_without_limits_that_killed_is_told(machine: Machine) -> None:
    machine.watch.note(PID)
    machine.write("a/b", kills=4, used=60 * GIB, limit=0)
    assert machine.watch.suspicion(PID) == "likely out of memory (cgroup 60 GiB, without a limit of its own)"


def test_kills_before_this_ones_life_are_not_its_own(machine: Machine) -> None:
    machine.write("a/b", kills=9, used=GIB, limit=32 * GIB)
    machine.watch.note(PID)
    machine.watch.note(PID)
    assert machine.watch.suspicion(PID) == ""
    assert machine.watch.suspicion(1) == "", "nobody was watched under this pid"


def test_a_process_that_is_moved_is_followed(machine: Machine) -> None:
    machine.watch.note(PID)
    machine.write("c", kills=7, used=GIB, limit=2 * GIB)
    machine.join("c")
    machine.watch.note(PID)
    (machine.proc / str(PID) / "cgroup").unlink()
    machine.watch.note(PID)
    machine.write("c", kills=8, used=2 * GIB, limit=2 * GIB)
    assert machine.watch.suspicion(PID) == "likely out of memory (cgroup 2/2 GiB)"


def test_a_process_that_is_leaving_its_group_as_it_dies_still_counts_there(machine: Machine) -> None:
    machine.write("a/b", kills=0, used=GIB, limit=GIB)
    machine.watch.note(PID)
    machine.write("a/b", kills=1, used=GIB, limit=GIB)
    machine.join("")
    machine.watch.note(PID)
    assert machine.watch.suspicion(PID) == "likely out of memory (cgroup 1/1 GiB)"


def test_without_counts_a_full_group_is_suspected_and_with_counts_it_is_not(machine: Machine) -> None:
    machine.write("a/b", kills=None, used=2 * GIB, limit=2 * GIB)
    machine.watch.note(PID)
    assert machine.watch.suspicion(PID) == "likely out of memory (cgroup 2/2 GiB)"
    machine.write("a/b", kills=0, used=2 * GIB, limit=2 * GIB)  # a full page cache is an ordinary day
    assert machine.watch.suspicion(PID) == ""


def test_in_a_container_the_visible_root_counts(machine: Machine) -> None:
    machine.join("host/path/of/this/container")
    machine.write("", kills=0, used=GIB, limit=GIB)
    machine.watch.note(PID)
    machine.write("", kills=1, used=GIB, limit=GIB)
    assert machine.watch.suspicion(PID) == "likely out of memory (cgroup 1/1 GiB)"
