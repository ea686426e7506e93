"""Keepers started through remote shells that are processes of this host, and ranks that are killed, stopped and cut
off."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from allspan.launch.hosts import fence, rank_shell
from allspan.launch.hosts.first_cause import first_cause
from allspan.launch.hosts.link import HostLink, keeper_command
from allspan.launch.hosts.messages import Facts, HostFile, HostLost, Message, RankExit, RankQuiet, RankStarted
from allspan.protos.api.errors import InternalError
from allspan.protos.cluster.cluster_file import RankInfo, error_file, heartbeat_file, write_rank
from allspan.protos.cluster.heartbeat import SERVING, Beat, BeatFile

M = TypeVar("M")
HOST_TIMEOUT_S = 1.5
SLEEP = ["sleep", "1000"]


class Host:
    """One host: a keeper behind a remote shell, and its ranks, started as mpirun does."""

    def __init__(self, folder: Path, name: str = "hostb") -> None:
        self.name = name
        self.run_dir = folder / name
        self.shm = Path("/dev/shm") / f"allspan-test-{os.getpid()}-{folder.name}-{name}"
        self.messages: queue.Queue[Message] = queue.Queue()
        self.seen: list[Message] = []
        self.shells: list[subprocess.Popen[bytes]] = []
        self.shell = folder / "rsh"
        self.shell.write_text('#!/bin/sh\nshift\n"$@"\nexit $?\n')
        self.shell.chmod(self.shell.stat().st_mode | stat.S_IXUSR)
        words = [str(self.shell), name, *keeper_command()]
        self.link = HostLink(name, words, self.messages.put, HOST_TIMEOUT_S)

    def start(self, **more: Any) -> Facts:
        self.link.start()
        facts = self.wait(Facts)
        folders = {"run_dir": str(self.run_dir), "shm": str(self.shm)}
        begin = {"do": "begin", **folders, "host_timeout": HOST_TIMEOUT_S, "supervisor_epoch": 1}
        self.link.ask(begin | more, 10)
        return facts

    def wait(self, kind: type[M], timeout_s: float = 10.0, fits: Callable[[M], bool] = lambda message: True) -> M:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self.messages.get(timeout=left)
            except queue.Empty:
                break
            self.seen.append(message)
            if isinstance(message, kind) and fits(message):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s: {self.seen}")

    def start_rank(self, rank: int, command: list[str] = SLEEP, epoch: int = 1) -> RankStarted:
        script = str(Path(rank_shell.__file__))
        exit_file = str(self.run_dir / f"exit-{rank}.e{epoch}")
        words = [sys.executable, "-S", "-E", script, exit_file, *command]
        self.shells.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        return self.wait(RankStarted, fits=lambda message: (message.rank, message.epoch) == (rank, epoch))

    def is_empty(self) -> bool:
        for shell in self.shells:
            shell.poll()
        gone = all(shell.returncode is not None for shell in self.shells)
        left = fence.processes(str(self.run_dir), str(self.shm))
        return gone and not left and not self.run_dir.exists() and not self.shm.exists()

    def close(self) -> None:
        self.link.close()
        fence.clean(str(self.run_dir), str(self.shm))
        for shell in self.shells:
            shell.wait(5)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def keeper_pid(host: Host) -> int:
    assert host.link.facts is not None
    return host.link.facts.pid


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def eventually(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done


def test_a_keeper_tells_its_host_and_makes_and_removes_the_folders(host: Host) -> None:
    facts = host.start()
    assert facts.topology["nodes"]
    assert "127.0.0.1" in [address.address for address in facts.addresses]
    assert abs(facts.time - time.time()) < 60
    assert host.run_dir.stat().st_mode & 0o777 == 0o700
    assert host.shm.stat().st_mode & 0o777 == 0o700
    host.link.ask({"do": "file", "path": "tls/key.pem", "text": "secret", "mode": 0o600}, 5)
    assert (host.run_dir / "tls/key.pem").read_text() == "secret"
    assert (host.run_dir / "tls/key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InternalError, match=r"hostb.*inside of the run directory"):
        host.link.ask({"do": "file", "path": "../other", "text": ""}, 5)
    (host.run_dir / "cluster.json.new").write_text("{}")
    (host.run_dir / "cluster.json.new").rename(host.run_dir / "cluster.json")
    assert host.wait(HostFile) == HostFile("hostb", "cluster.json", "{}")
    host.link.close()
    assert host.is_empty()
    assert not any(isinstance(message, HostLost) for message in host.seen)


@pytest.mark.alone
def test_a_rank_killed_is_told_with_its_signal_and_last_words_at_once(host: Host) -> None:
    host.start()
    for rank in range(10):
        started = host.start_rank(rank, ["sh", "-c", f"echo rank {rank} works; exec sleep 1000"])
        log = host.run_dir / f"log-{rank}.e1"
        assert eventually(log.exists, 5)
        begun = time.monotonic()
        os.kill(started.pid, signal.SIGKILL)
        death = host.wait(RankExit, 2)
        assert time.monotonic() - begun < 0.5
        assert (death.host, death.rank, death.pid, death.signal, death.code) == ("hostb", rank, started.pid, 9, 0)
        assert death.words == f"rank {rank} works"
        assert not death.followed
        assert not death.ended_by
        assert abs(death.moment - begun) < 0.5
        assert host.shells[-1].wait(5) == -signal.SIGKILL


def test_exit_codes_and_exit_reports_are_told(host: Host) -> None:
    host.start()
    error_file(host.run_dir, 3, 7).write_text("weights/model: no such file\n")
    host.start_rank(3, ["sh", "-c", "sleep 0.3; exit 4"], epoch=7)
    death = host.wait(RankExit, 5)
    assert (death.code, death.signal, death.epoch, death.report) == (4, 0, 7, "weights/model: no such file")
    assert [message.path for message in host.seen if isinstance(message, HostFile)] == ["rank-3.e7.error"]
    assert host.shells[-1].wait(5) == 4


def test_ranks_that_died_of_another_are_not_blamed(host: Host) -> None:
    host.start()
    ranks = [host.start_rank(rank) for rank in range(3)]
    os.kill(ranks[1].pid, signal.SIGKILL)
    host.shells[0].kill()  # as mpirun ends the others
    host.shells[2].terminate()
    ends = [host.wait(RankExit) for _ in range(3)]
    assert {end.rank for end in ends} == {0, 1, 2}
    assert {end.rank for end in ends if end.followed} == {0}
    assert {end.rank: end.ended_by for end in ends} == {0: 0, 1: 0, 2: signal.SIGTERM}
    cause = first_cause(ends)
    assert cause is not None
    assert (cause.rank, cause.signal) == (1, 9)


def test_survivors_errors_are_hearsay_whatever_came_first() -> None:
    heard = RankExit("a", 1, 0, 10, code=14, words="Socket closed ... calling abort", moment=1.0)
    killed = RankExit("b", 1, 1, 11, signal=9, moment=1.3)
    failed = RankExit("a", 1, 2, 12, code=1, report="no such model", moment=1.29)
    assert first_cause([heard, killed]) == killed
    assert first_cause([heard]) == heard
    assert first_cause([]) is None
    assert first_cause([heard, failed, killed]) == killed  # a signal, within what clocks can tell
    assert first_cause([RankExit("a", 1, 2, 12, code=1, report="no such model", moment=1.1), killed]) != killed


def test_a_supervisor_that_ends_leaves_nothing_behind_a_shell_that_died(host: Host) -> None:
    host.start()
    started = host.start_rank(0)
    process = host.link._process
    assert process is not None
    assert process.stdin is not None
    process.kill()  # the remote shell; its keeper still holds the connection
    time.sleep(0.5)
    assert not is_gone(started.pid)
    host.link._closing = True  # as a supervisor that is killed: no more beats
    assert host.link._writer is not None
    host.link._writer.close(1)
    begun = time.monotonic()
    assert eventually(host.is_empty, HOST_TIMEOUT_S + 1)
    assert time.monotonic() - begun > HOST_TIMEOUT_S / 2
    assert eventually(lambda: is_gone(keeper_pid(host)), 1)
    process.wait(5)
    process.stdin.close()


def test_an_mpi_daemon_of_the_world_is_fenced_with_it(host: Host) -> None:
    host.start()
    daemon = host.run_dir.parent / "prted"
    shutil.copy("/bin/sleep", daemon)
    other = subprocess.Popen([str(daemon), "1000"])
    mine = subprocess.Popen([str(daemon), "1000"], env={"PRTE_MCA_prte_tmpdir_base": str(host.shm)})
    try:
        host.link.close()
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        mine.kill()
        other.wait()
        mine.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_keeper_that_is_killed_or_stopped_leaves_nothing(host: Host, number: int) -> None:
    host.start()
    host.start_rank(0)
    os.kill(keeper_pid(host), number)
    lost = host.wait(HostLost, HOST_TIMEOUT_S + 2)
    assert lost.host == "hostb"
    assert eventually(host.is_empty, HOST_TIMEOUT_S + 1)


def test_a_stopped_supervisor_is_not_judged_by_its_own_link(host: Host) -> None:
    host.start()
    judge = host.link
    keeper = keeper_pid(host)
    # Both ends stand still at once, as a whole machine does: here the keeper, and this process's view of time.
    os.kill(keeper, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(keeper, signal.SIGCONT)
    time.sleep(HOST_TIMEOUT_S + 0.5)
    assert judge.last_heard is not None
    assert time.monotonic() - judge.last_heard < 1
    assert not any(isinstance(message, HostLost) for message in host.messages.queue)


def test_a_stuck_rank_is_told_as_the_watchdog_says_it(host: Host) -> None:
    host.start(watchdog_timeout=1.0)
    started = host.start_rank(0)
    write_rank(host.run_dir, RankInfo(0, started.pid, "hostb", "10.0.0.2:50"), 1)
    assert host.wait(RankStarted, fits=lambda message: bool(message.address)).address == "10.0.0.2:50"
    BeatFile(heartbeat_file(host.run_dir, 0, 1)).write(Beat(1, 1, 5, phase=SERVING))
    quiet = host.wait(RankQuiet, 5)
    assert (quiet.rank, quiet.pid) == (0, started.pid)
    assert "was silent for 1." in quiet.words


def test_ranks_are_signalled_and_an_epoch_cleared(host: Host) -> None:
    host.start()
    host.start_rank(0)
    host.link.send({"do": "signal", "number": 15})
    death = host.wait(RankExit)
    assert (death.signal, death.ended_by) == (15, 15)
    host.start_rank(1)
    host.link.ask({"do": "clear", "epoch": 1}, 10)
    assert eventually(lambda: host.shells[1].poll() is not None, 1)
    assert not list(host.run_dir.glob("*.e1*"))
    assert host.start_rank(0, epoch=2).epoch == 2


def test_two_clusters_cannot_have_the_same_folders(host: Host, tmp_path: Path) -> None:
    host.start()
    second = HostLink("hostb", [str(host.shell), "hostb", *keeper_command()], lambda message: None)
    second.start()
    folders = {"run_dir": str(host.run_dir), "shm": str(host.shm)}
    try:
        with pytest.raises(InternalError, match=r"host hostb: .*is in use by another cluster"):
            second.ask({"do": "begin", **folders, "host_timeout": 1}, 10)
    finally:
        second.close()
    assert host.run_dir.exists()


def test_a_folder_that_cannot_be_made_is_told_and_nothing_is_left(host: Host) -> None:
    (host.run_dir.parent / "file").write_text("")
    host.shm = host.run_dir.parent / "file" / "shm"
    with pytest.raises(InternalError, match=r"host hostb: begin: .*Not a directory"):
        host.start()
    assert not host.run_dir.exists()


def test_a_rank_that_writes_much_has_a_bounded_log(tmp_path: Path) -> None:
    exit_file = tmp_path / "exit-0.e1"
    command = ["sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x; echo; echo the end"]
    words = [sys.executable, "-S", "-E", str(Path(rank_shell.__file__)), str(exit_file), *command]
    assert subprocess.run(words, stdout=subprocess.DEVNULL, timeout=30).returncode == 0
    assert (tmp_path / "log-0.e1").read_text().endswith("x\nthe end\n")
    assert sum(path.stat().st_size for path in tmp_path.glob("log-*")) <= 2 * rank_shell.KEPT_BYTES


def test_a_remote_shell_that_fails_is_told_once_with_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    messages: queue.Queue[Message] = queue.Queue()
    link = HostLink("hostz", ["sh", "-c", "echo no route to host >&2; exit 255"], messages.put)
    link.start()
    lost = messages.get(timeout=10)
    assert isinstance(lost, HostLost)
    assert "ended with status 255" in lost.cause
    assert "no route to host" in lost.cause
    assert capfd.readouterr().err == ""
