"""Shared memory, disks and file systems that are small, full or read-only: served all the same, or refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from support.fault_hosts import with_mounts
from support.serving import Served, Traces

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(180)

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def refused(served: Served, code: int, within: float = 10.0) -> str:
    """The one line that a start ends with, after nothing of it is left."""
    traces = Traces(served.runtime, [served.process.pid], [])
    started = time.monotonic()
    assert served.wait_exit(60.0) == code, served.log
    assert time.monotonic() - started < within
    traces.assert_gone(within=1.0)
    assert "Traceback" not in served.log
    line = served.log.splitlines()[-1]
    assert line.startswith("allspan serve: "), served.log
    return line


def answers(served: Served) -> int:
    with ClientEngine(attach=served.run_dir) as engine:
        return len(engine.generate([[1, 2, 3]], GREEDY)[0].token_ids)


def test_too_little_shared_memory_is_refused_with_numbers_and_the_flag(start: Start) -> None:
    served = start(wait=False, wrap=with_mounts("mount -t tmpfs -o size=1m tmpfs /dev/shm"))
    line = refused(served, 2)
    assert "/dev/shm has 1.0 MiB free" in line
    assert "--shm-size" in line


def test_without_writable_shared_memory_the_run_directory_does(start: Start) -> None:
    served = start("--no-gateway", wrap=with_mounts("mount -t tmpfs -o ro tmpfs /dev/shm"))
    assert answers(served) == 8
    assert served.ask_to_end() == 0


def test_docker_s_shared_memory_and_a_full_disk_under_the_log_do_not_stop_it(start: Start, tmp_path: Path) -> None:
    shm = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    disk = f"mount -t tmpfs -o size=16k tmpfs {tmp_path}; head -c 16384 /dev/zero > {tmp_path}/log || :"
    served = start("--no-gateway", wrap=with_mounts(f"{shm}\n{disk}\nexec 2>> {tmp_path}/log"))
    assert answers(served) == 8
    assert served.ask_to_end() == 0


def test_a_full_disk_under_the_run_directory_is_refused_by_name(start: Start, runtime: Path) -> None:
    fill = f"mount -t tmpfs -o size=16k tmpfs {runtime}; head -c 16384 /dev/zero > {runtime}/full || :"
    line = refused(start(wait=False, wrap=with_mounts(fill)), 2)
    assert str(runtime) in line
    assert "0 bytes free" in line
    assert "--run-dir" in line


def test_a_read_only_system_is_refused_by_name_and_served_from_where_it_may_write(start: Start, runtime: Path) -> None:
    mounts = f"mount -t tmpfs -o ro tmpfs {runtime}; mount -t tmpfs -o ro tmpfs /run; mount -t tmpfs -o ro tmpfs /var"
    read_only = with_mounts(f"{mounts}; mount --bind /tmp /tmp; mount -o remount,bind,ro /tmp")
    line = refused(start(wait=False, wrap=read_only), 2)
    assert "Read-only file system" in line
    assert "--run-dir" in line
    served = start("--no-gateway", f"--run-dir=/dev/shm/{runtime.name}", wrap=read_only)
    try:
        with ClientEngine(attach=Path("/dev/shm") / runtime.name) as engine:
            assert len(engine.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8
    finally:
        assert served.ask_to_end() == 0
    assert not (Path("/dev/shm") / runtime.name).exists()
