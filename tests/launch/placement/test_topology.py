"""Reading a machine from /sys and /proc, made up here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from allspan.launch.placement.topology import cpu_quota, parse_list, read_topology


def machine(root: Path, nodes: Mapping[int, str], siblings: int = 1, memory_nodes: str = "") -> tuple[Path, Path]:
    """A /sys and a /proc of a machine whose node N has the processors of a kernel list; neighbours share a core."""
    sys_root, proc_root = root / "sys", root / "proc"
    for node, cpus in nodes.items():
        folder = sys_root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemFree:  1000 kB\nNode {node} FilePages:  24 kB\n")
        for cpu in parse_list(cpus):
            topology = sys_root / f"devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{node}\n")
            (topology / "core_id").write_text(f"{cpu // siblings}\n")
            (topology / "thread_siblings_list").write_text(f"{cpu // siblings}\n")
    (proc_root / "self").mkdir(parents=True)
    (proc_root / "self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{memory_nodes or '0-63'}\n")
    (proc_root / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  2048 kB\n")
    return sys_root, proc_root


def shape(root: tuple[Path, Path], allowed: Sequence[int]) -> dict[int, tuple[tuple[int, ...], ...]]:
    return {node.index: node.cores for node in read_topology(*root, allowed=allowed).nodes}


def test_nodes_that_are_not_contiguous(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-1,8-9", 2: "2-3", 5: "4", 11: "5-6"})
    assert shape(root, range(10)) == {0: ((0,), (1,), (8,), (9,)), 2: ((2,), (3,)), 5: ((4,),), 11: ((5,), (6,))}


def test_hardware_threads_count_as_one_core(tmp_path: Path) -> None:
    assert shape(machine(tmp_path, {0: "0-3"}, siblings=2), range(4)) == {0: ((0, 1), (2, 3))}


def test_only_allowed_processors_and_memory_nodes_count(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-1", 1: "2-3", 2: "4-5"}, memory_nodes="0,2")
    assert shape(root, (1, 2, 3, 4)) == {0: ((1,),), 2: ((4,),)}


def test_memory_of_several_nodes_is_each_nodes_own_and_of_one_the_machines(tmp_path: Path) -> None:
    two = read_topology(*machine(tmp_path / "two", {0: "0", 1: "1"}), allowed=(0, 1))
    assert [node.memory_available for node in two.nodes] == [1024 << 10] * 2
    one = read_topology(*machine(tmp_path / "one", {0: "0-1"}), allowed=(0, 1))
    assert [node.memory_available for node in one.nodes] == [2048 << 10]


def test_a_machine_without_numa_in_sys_is_one_node(tmp_path: Path) -> None:
    assert shape((tmp_path / "sys", tmp_path / "proc"), (0, 1)) == {0: ((0,), (1,))}


@pytest.mark.parametrize(
    ("file", "text", "quota"),
    [
        ("fs/cgroup/cpu.max", "150000 100000\n", 1.5),
        ("fs/cgroup/cpu.max", "max 100000\n", None),
        ("fs/cgroup/cpu.max", "rubbish\n", None),
    ],
)
def test_the_cgroups_quota(tmp_path: Path, file: str, text: str, quota: float | None) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert cpu_quota(tmp_path, tmp_path / "no proc") == quota


@pytest.mark.parametrize(
    ("lines", "quotas", "expected"),
    [
        ("0::/system.slice/a.service\n", {"system.slice/a.service": 2, "system.slice": 3}, 2.0),
        ("0::/system.slice/a.service\n", {"system.slice/a.service": 4, "system.slice": 3, "other": 1}, 3.0),
        ("0::/outside/only\n", {"": 3}, 3.0),
        ("5:memory:/x\n4:cpu,cpuacct:/y\n0::/\n", {"cpu/y": 2, "cpu/x": 1, "x": 1}, 2.0),
        ("0::/free\n", {"free": None}, None),
    ],
)
def test_the_quota_is_the_least_of_the_cgroups_around_this_process(
    lines: str, quotas: Mapping[str, int | None], expected: float | None, tmp_path: Path
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(lines)
    for name, count in quotas.items():
        folder = tmp_path / "fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text("max 100000\n" if count is None else f"{count}00000 100000\n")
    assert cpu_quota(tmp_path, tmp_path) == expected


def test_the_quota_of_an_older_cgroup_limits_the_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7"})
    folder = root[0] / "fs/cgroup/cpu"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("300000")
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert read_topology(*root, allowed=range(8)).num_cores == 3


def test_kernel_lists() -> None:
    assert parse_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert parse_list("") == ()
    with pytest.raises(ValueError, match="x"):
        parse_list("1-x")


def test_processors_are_one_of_every_core_first_and_then_the_siblings(tmp_path: Path) -> None:
    topology = read_topology(*machine(tmp_path, {0: "0-5", 1: "6-7"}, siblings=2), allowed=(0, 1, 2, 4, 5, 6, 7))
    assert [node.processors for node in topology.nodes] == [(0, 2, 4, 1, 5), (6, 7)]
    assert (topology.num_cores, topology.num_processors) == (4, 7)
