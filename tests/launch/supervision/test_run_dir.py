"""The run directory: private, locked while its cluster lives, and gone soon after."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allspan.launch.supervision import reaper
from allspan.launch.supervision.run_dir import RunDir, base_dir, make_run_dir, remove_stale
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.cluster_file import socket_path
from support.waiting import wait_until


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A short runtime folder of the test's own (socket paths are limited)."""
    folder = Path(f"/tmp/al-{os.getpid()}")
    folder.mkdir(mode=0o700)
    yield {"XDG_RUNTIME_DIR": str(folder)}
    shutil.rmtree(folder)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def dies(run: RunDir) -> None:
    """As if the supervisor had been killed: its lock is free."""
    os.close(run.lock_fd)


def sleeper(run_dir: Path) -> subprocess.Popen[bytes]:
    """A process that counts as the cluster's, by its command line."""
    words = [sys.executable, "-c", "import time; time.sleep(60)", f"{run_dir}/worker-0.e1.json"]
    process = subprocess.Popen(words)
    wait_until(lambda: reaper.processes(str(run_dir)) == [process.pid])
    return process


def test_it_is_private_short_and_goes_with_its_memory_files(runtime: dict[str, str], shm: Path) -> None:
    run = make_run_dir("", runtime, shm)
    assert run.path.parent == Path(runtime["XDG_RUNTIME_DIR"]) / "allspan"
    assert [path.stat().st_mode & 0o777 for path in (run.path, run.shm)] == [0o700, 0o700]
    assert len(str(socket_path(run.path, 1023, 99))) < 100
    (run.shm / "segment").write_bytes(b"x")
    (run.shm / "ompi.1").mkdir()
    run.clear_shm()
    assert [path.name for path in run.shm.iterdir()] == [reaper.OWNER_FILE]
    run.remove()
    assert not run.path.exists()
    assert not run.shm.exists()


def test_two_clusters_never_meet(runtime: dict[str, str], shm: Path) -> None:
    first, second = make_run_dir("", runtime, shm), make_run_dir("", runtime, shm)
    assert first.path != second.path
    assert first.shm != second.shm
    assert first.path.exists(), "the second start removed a live cluster's folder"
    with pytest.raises(ConfigError, match="in use by another cluster"):
        make_run_dir(str(first.path), runtime, shm)
    for run in (first, second):
        run.remove()


def test_the_next_start_removes_what_a_dead_cluster_left(runtime: dict[str, str], shm: Path) -> None:
    dead = make_run_dir("", runtime, shm)
    elsewhere = make_run_dir(f"{runtime['XDG_RUNTIME_DIR']}/mine", runtime, shm)
    orphan = sleeper(dead.path)
    for run in (dead, elsewhere):
        dies(run)
    run = make_run_dir("", runtime, shm)
    assert orphan.wait(5) == -signal.SIGKILL
    for path in (dead.path, dead.shm, elsewhere.path, elsewhere.shm):
        assert not path.exists(), path
    assert remove_stale(base_dir(runtime), shm) == []
    run.remove()


def test_memory_files_name_nothing_but_run_directories_to_be_removed(
    runtime: dict[str, str], shm: Path, tmp_path: Path
) -> None:
    """/dev/shm is everybody's, and a dead cluster's --run-dir may have become a folder of another kind."""
    home = tmp_path / "home"
    home.mkdir()
    stale = shm / f"allspan-{os.getuid()}-0123"
    stale.mkdir()
    (stale / reaper.OWNER_FILE).write_text(str(home))
    make_run_dir("", runtime, shm).remove()
    assert [path.name for path in home.iterdir()] == []
    assert not stale.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder away needs root")
def test_memory_files_of_another_user_are_left_alone(runtime: dict[str, str], shm: Path) -> None:
    victim = make_run_dir("", runtime, shm)
    os.chown(victim.shm, 12345, 12345)
    dies(victim)
    make_run_dir("", runtime, shm).remove()
    assert (victim.shm / reaper.OWNER_FILE).exists()


def test_a_folder_with_other_files_is_refused_and_kept(runtime: dict[str, str], shm: Path, tmp_path: Path) -> None:
    folder = Path(runtime["XDG_RUNTIME_DIR"]) / "docs"
    folder.mkdir(mode=0o755)
    (folder / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        make_run_dir(str(folder), runtime, shm)
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("folder", ["relative", "/tmp/" + "x" * 80, "/nonesuch"])
def test_a_runtime_folder_that_will_not_do_is_not_used(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = folder != "/nonesuch"
    if made:
        Path(folder).mkdir()
    try:
        assert base_dir({"XDG_RUNTIME_DIR": folder}) == Path(f"/tmp/allspan-{os.getuid()}")
    finally:
        if made:
            shutil.rmtree(folder)


def test_a_path_too_long_for_a_socket_is_refused(runtime: dict[str, str], shm: Path) -> None:
    with pytest.raises(ConfigError, match=r"socket paths of \d+ bytes, at most 100"):
        make_run_dir("/tmp/" + "x" * 100, runtime, shm)


def test_a_runtime_folder_that_others_can_write_to_is_refused(runtime: dict[str, str], shm: Path) -> None:
    base = Path(runtime["XDG_RUNTIME_DIR"]) / "allspan"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(ConfigError, match="others cannot write to"):
        make_run_dir("", runtime, shm)


def test_without_shared_memory_its_files_lie_in_the_run_directory(runtime: dict[str, str], tmp_path: Path) -> None:
    run = make_run_dir("", runtime, tmp_path / "nonesuch")
    assert run.shm == run.path / "shm"
    run.remove()


def test_replicas_lie_below_and_go_with_all(runtime: dict[str, str], shm: Path) -> None:
    run = make_run_dir("", runtime, shm, replicas=2)
    parts = [run.replica(index) for index in (0, 1)]
    assert [part.path for part in parts] == [run.path / "replica-0", run.path / "replica-1"]
    for part in parts:
        assert [path.stat().st_mode & 0o777 for path in (part.path, part.shm)] == [0o700, 0o700]
        (part.shm / "segment").write_bytes(b"x")
    ranks = [sleeper(part.path) for part in parts]
    assert sorted(reaper.processes(str(run.path))) == sorted(rank.pid for rank in ranks)
    assert reaper.kill(str(parts[0].path)) == []
    parts[0].clear_shm()
    assert ranks[0].wait(5) == -signal.SIGKILL
    assert ranks[1].poll() is None, "a replica's end was the other's, too"
    assert (parts[1].shm / "segment").exists()
    reaper.clean(str(run.path), str(run.shm))
    assert ranks[1].wait(5) == -signal.SIGKILL
    assert not run.shm.exists()
    dies(run)


def test_a_path_that_only_replicas_make_too_long_is_refused(runtime: dict[str, str], shm: Path) -> None:
    path = "/tmp/" + "x" * 78
    make_run_dir(path, runtime, shm).remove()
    with pytest.raises(ConfigError, match=r"socket paths of \d+ bytes, at most 100"):
        make_run_dir(path, runtime, shm, replicas=2)


def reap(run: RunDir) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-E", reaper.__file__, str(run.path), str(run.shm)], stdin=subprocess.PIPE
    )


def test_the_reaper_ends_everything_when_the_supervisor_dies(runtime: dict[str, str], shm: Path) -> None:
    run = make_run_dir("", runtime, shm)
    (run.path / "cluster.json").write_text(json.dumps({}))
    rank, watch = sleeper(run.path), reap(run)
    assert watch.stdin is not None
    watch.stdin.close()
    assert rank.wait(5) == -signal.SIGKILL
    assert watch.wait(5) == 0
    assert not run.path.exists()
    assert not run.shm.exists()
    dies(run)


def test_the_reaper_leaves_alone_what_was_ended_in_order(runtime: dict[str, str], shm: Path) -> None:
    run = make_run_dir("", runtime, shm)
    watch = reap(run)
    watch.communicate(reaper.GOODBYE, timeout=5)
    assert run.path.exists()
    run.remove()
