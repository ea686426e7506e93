"""Supervisors' threads: whatever happens in them, nobody waits for them in vain."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allspan.launch.placement.placement import Placement, RankPlace
from allspan.launch.supervision import supervisor as supervisor_module
from allspan.launch.supervision import world as world_module
from allspan.launch.supervision.cluster import Cluster
from allspan.launch.supervision.mpi import OPEN_MPI, Mpirun
from allspan.launch.supervision.run_dir import make_run_dir
from allspan.launch.supervision.supervisor import SupervisorConfig
from allspan.launch.supervision.world import WorldPlan, WorldProcess, is_readable
from allspan.protos.api.errors import AllspanError, InternalError
from allspan.protos.cluster.cluster_file import RankInfo, write_rank
from allspan.protos.config.settings import ModelConfig, ServiceConfig, WorkerConfig
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short folder (socket paths are limited)."""
    folder = Path(f"/tmp/as-{os.getpid()}")
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


def plan(run_dir: Path, mpirun: str = "/bin/false") -> WorldPlan:
    """`mpirun` is started with the words of a world of one rank."""
    config = WorkerConfig(
        ModelConfig(path=str(run_dir.parent / "m.gguf"), name="none"), ServiceConfig(run_dir=str(run_dir))
    )
    return WorldPlan(config, Placement((RankPlace(0, None, 1),)), Mpirun(mpirun, OPEN_MPI, (5, 0, 0)))


def supervised(runtime: Path, mpirun: str = "/bin/false") -> Cluster:
    run = make_run_dir("", {"XDG_RUNTIME_DIR": str(runtime)}, runtime / "shm")
    cluster = Cluster([plan(run.path, mpirun)], run, SupervisorConfig(restart=False))
    cluster.start()
    return cluster


def error_of(cluster: Cluster) -> AllspanError:
    assert not cluster.wait_ready()
    cluster.join()
    assert cluster.error is not None
    return cluster.error


def test_an_mpirun_that_ends_at_once_is_named_and_leaves_nothing(runtime: Path) -> None:
    cluster = supervised(runtime)
    assert "mpirun" in error_of(cluster).message
    assert not cluster.run_dir.exists()


def test_weights_that_are_cut_while_mapped_are_the_cause(runtime: Path) -> None:
    program = runtime / "mpirun"
    model = make_run_dir("", {"XDG_RUNTIME_DIR": str(runtime)}, runtime / "shm").path.parent / "m.gguf"
    model.write_bytes(bytes(1000))
    program.write_text(f"#!/bin/sh\ntruncate -s 10 {model}\nkill -BUS $$\n")
    program.chmod(0o755)
    message = error_of(supervised(runtime, str(program))).message
    assert f"SIGBUS): {model} was cut from 1000 to 10 bytes while it was in use: put it back" in message


def test_shared_memory_that_is_full_is_called_so(runtime: Path) -> None:
    program = runtime / "mpirun"
    program.write_text("#!/bin/sh\nkill -BUS $$\n")
    program.chmod(0o755)
    message = error_of(supervised(runtime, str(program))).message
    assert "SIGBUS" in message
    assert "full" in message
    assert "--shm-size" in message


def test_a_bug_in_its_thread_ends_the_wait_and_leaves_nothing(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> WorldProcess:
        raise ValueError("a bug")

    monkeypatch.setattr(supervisor_module, "WorldProcess", broken)
    cluster = supervised(runtime)
    error = error_of(cluster)
    assert isinstance(error, InternalError)
    assert "a bug" in error.message
    assert not cluster.run_dir.exists()


def test_a_state_that_cannot_be_written_hides_no_cause(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor_module, "write_cluster", full)
    cluster = supervised(runtime)
    assert "mpirun" in error_of(cluster).message
    assert not cluster.run_dir.exists()
    assert "No space left on device" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_stops_no_rank(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run_dir("", {"XDG_RUNTIME_DIR": str(runtime)}, runtime / "shm")
    done = runtime / "done"
    program = runtime / "mpirun"
    program.write_text(f"#!/bin/sh -e\nfor i in 1 2 3; do seq 20000; done\ntouch {done}\nsleep 30\n")
    program.chmod(0o755)
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        world = WorldProcess(plan(run.path, str(program)), run, 1)
        try:
            wait_until(done.exists, 20.0)
        finally:
            world.end(None)
            run.remove()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # it is flushed once more when it closes
    assert done.exists()


def test_a_rank_that_has_ended_is_not_signalled_by_its_number(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another process's by then."""
    program = runtime / "mpirun"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    run = make_run_dir("", {"XDG_RUNTIME_DIR": str(runtime)}, runtime / "shm")
    world = WorldProcess(plan(run.path, str(program)), run, 1)
    rank = subprocess.Popen(["sleep", "30"])
    write_rank(run.path, RankInfo(0, rank.pid, "here"), 1)
    world.wait([], done=lambda: bool(world.ranks), timeout_s=5.0)
    rank.kill()
    rank.wait(5.0)
    signalled: list[int] = []
    kill = os.kill

    def noted(pid: int, number: int) -> None:
        signalled.append(pid)
        kill(pid, number)

    monkeypatch.setattr(os, "kill", noted)
    monkeypatch.setattr(world_module, "END_GRACE_S", 0.1)
    world.end(0.1)
    run.remove()
    assert world.ranks == ()
    assert rank.pid not in signalled


def test_descriptors_beyond_selects_limit_can_be_waited_for() -> None:
    """A gateway with a thousand connections starts its next world, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("no right to so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    read, write = os.pipe()
    high = os.dup2(read, 2000)
    try:
        assert not is_readable([high], 0.0)
        os.write(write, b"x")
        assert is_readable([high], 1.0)
    finally:
        for fd in (read, write, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
