"""What a rank asks of its operating system."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from allspan.protos.api.errors import ConfigError, Unavailable
from allspan.worker.process import host
from allspan.worker.process.host import ExitReport, memory_nodes, watch_process
from support.waiting import wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the parent-death signal")


@linux_only
def test_a_process_dies_with_its_parent() -> None:
    child = (
        "from allspan.worker.process.host import die_with_parent; die_with_parent(); "
        "print('ready', flush=True); input()"
    )
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "input()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
    wait_until(lambda: not alive(pid), 10, "the child's end")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_end_of_a_watched_process_is_noticed() -> None:
    gone = threading.Event()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch_process(process.pid, gone.set)
        assert not gone.is_set()
        process.kill()
    assert gone.wait(10)


def test_a_process_that_is_gone_already_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone = threading.Event()
    watch_process(process.pid, gone.set)
    assert gone.wait(10)


def test_the_end_is_noticed_where_the_kernel_has_no_process_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    def pidfd_open(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(host, "_POLL_S", 0.01)
    gone = threading.Event()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch_process(process.pid, gone.set)
        assert not gone.wait(0.05)
        process.kill()
    assert gone.wait(10)


@linux_only
def test_memory_of_a_process_that_binds_itself_is_of_that_node() -> None:
    code = (
        "import mmap\n"
        "from allspan.protos.api.errors import Unavailable\n"
        "from allspan.worker.process.host import bind_memory\n"
        "try:\n    bind_memory(0)\nexcept Unavailable as error:\n    print(error.message)\n    raise SystemExit(9)\n"
        "memory = mmap.mmap(-1, 1 << 20)\n"
        "memory.write(bytes(1 << 20))\n"
        "print(sum('bind:0' in line for line in open('/proc/self/numa_maps')))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode == 9:
        pytest.skip(f"this system does not let a process bind its memory: {run.stdout.strip()}")
    if run.returncode and "numa_maps" in run.stderr:
        pytest.skip("this kernel has no NUMA")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0


@linux_only
def test_binding_to_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(Unavailable):
        host.bind_memory(1023)


def test_memory_nodes_are_those_of_the_processors(tmp_path: Path) -> None:
    for node, cpu in (("node0", 0), ("node0", 1), ("node2", 2)):
        (tmp_path / "sys/devices/system/node" / node / f"cpu{cpu}").mkdir(parents=True)
    assert memory_nodes((), tmp_path) == ()
    assert memory_nodes((0, 1), tmp_path) == ("node0",)
    assert memory_nodes((1, 2), tmp_path) == ("node0", "node2")


def test_an_exit_report_is_one_line_then_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rank-1.e1.error"
    try:
        raise ConfigError("model.safetensors\nis cut short")
    except ConfigError as error:
        ExitReport(file, 1).write(error)
    first, *rest = file.read_text().splitlines()
    assert first == "model.safetensors is cut short"
    assert rest[0].startswith("Traceback")
    assert capsys.readouterr().err == "allspan.worker: rank 1: model.safetensors is cut short\n"


def test_only_the_first_error_is_reported(tmp_path: Path) -> None:
    words = ExitReport(tmp_path / "words", 0)
    words.write(ValueError("the cause"))
    words.write(ValueError("what followed"))
    assert (tmp_path / "words").read_text().startswith("ValueError: the cause\n")


def test_a_bug_shows_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError("row")
    except KeyError as error:
        ExitReport(tmp_path / "words", 0).write(error)
    assert "Traceback" in capsys.readouterr().err
    assert (tmp_path / "words").read_text().startswith("KeyError: 'row'\n")
