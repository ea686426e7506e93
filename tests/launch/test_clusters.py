"""ps, stop and logs: running clusters are found by their run directories, chosen by what users call them, and ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from allspan.launch.commands.clusters import logs, ps, stop
from allspan.launch.commands.clusters.choice import choose
from allspan.launch.commands.clusters.logs import FollowedLog, RankFilter
from allspan.launch.logs import KEPT_BYTES, LogCopy
from allspan.launch.supervision.run_dir import RunDir, make_run_dir
from allspan.protos.api.errors import ConfigError, Unavailable
from allspan.protos.cluster.cluster_file import ClusterInfo, RankInfo, write_cluster
from allspan.protos.cluster.running import (
    LOG_FILE,
    RunningCluster,
    RunRecord,
    find_by_address,
    read_running,
    running_clusters,
    write_addresses,
    write_record,
)
from support.serving import runtime_folder

Begin = Callable[..., RunDir]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Returns a function that makes the run directory of a cluster whose launcher has the given process id."""
    with runtime_folder() as runtime:  # short: a socket's path is
        yield from _begin(runtime, tmp_path / "shm", monkeypatch)


def _begin(runtime: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    environ = {"XDG_RUNTIME_DIR": str(runtime)}
    shm.mkdir()
    made = []

    def begin(name: str, pid: int = 1, state: str = "ready", run_dir: str = "") -> RunDir:
        run = make_run_dir(run_dir, environ, shm)
        ranks = (RankInfo(0, 11, "here"), RankInfo(1, 12, "here"))
        write_cluster(run.path, ClusterInfo(1, state, name, f"/models/{name}", ranks=ranks))
        booted = time.clock_gettime(time.CLOCK_BOOTTIME) - 125
        write_record(run.path, RunRecord(pid, name, f"/models/{name}", 2, time.time(), booted))
        made.append(run)
        return run

    def found() -> list[RunningCluster]:
        folders = (runtime, shm.parent)
        return [one for one in running_clusters(environ, shm) if any(map(one.run_dir.is_relative_to, folders))]

    for module in (ps, stop, logs):
        monkeypatch.setattr(module, "running_clusters", found)
    yield begin
    for run in made:
        run.remove()


def test_ps_shows_what_runs_wherever_its_run_directory_is(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = begin("org/tiny")
    second = begin("other", 77, "starting", str(tmp_path / "own"))
    write_addresses(first.path, "http://127.0.0.1:8000", "127.0.0.1:50051")
    assert ps.run(["--json"]) == 0
    shown = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert shown["org/tiny"]["http"] == "http://127.0.0.1:8000"
    assert [rank["pid"] for rank in shown["org/tiny"]["ranks"]] == [11, 12]
    assert (shown["other"]["state"], shown["other"]["run_dir"]) == ("starting", str(second.path))
    assert ps.run([]) == 0
    table = capsys.readouterr().out
    assert re.search(r"org/tiny +1 +ready +2 +2 min \d s +http://127.0.0.1:8000 +127.0.0.1:50051 +/", table)


def test_a_dead_cluster_is_not_shown(begin: Begin) -> None:
    run = begin("tiny")
    assert read_running(run.path) is not None
    os.close(run.lock_fd)
    assert read_running(run.path) is None
    object.__setattr__(run, "lock_fd", os.open(os.devnull, os.O_RDONLY))  # for the fixture to close


def test_a_cluster_is_chosen_by_any_of_its_names(begin: Begin) -> None:
    run, other = begin("Org/Tiny", 41), begin("other", 42)
    write_addresses(run.path, "http://127.0.0.1:8000", "127.0.0.1:50051")
    clusters = stop.running_clusters()
    for which in ("org/tiny", "TINY", "41", str(run.path), run.path.name, "localhost:8000", "grpc://127.0.0.1:50051"):
        assert choose(which, clusters).record.pid == 41, which
    with pytest.raises(ConfigError, match=r"which one\?.*pid 41.*pid 42"):
        choose(None, clusters)
    with pytest.raises(Unavailable, match="no running cluster is called 'absent'"):
        choose("absent", clusters)
    with pytest.raises(Unavailable, match="no cluster of this user is running"):
        choose(None, [])
    assert find_by_address("http://example.com:8000", clusters) is None
    assert other.path != run.path


PATIENT = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); print(flush=True); signal.pause()"


def test_stop_waits_for_the_end_and_its_exit_code_says_whether_it_came(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, stopped, code in (([], False, 0), (["--timeout", "0.1"], True, 1), (["--now"], True, 0)):
        with subprocess.Popen([sys.executable, "-c", PATIENT], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            run = begin("tiny", process.pid)
            try:
                if stopped:
                    process.send_signal(signal.SIGSTOP)  # takes no signal but SIGKILL
                stop.KILL_AFTER_S = 0.2
                assert stop.run(["tiny", *flags]) == code
            finally:
                process.kill()
            run.erase()
        words = capsys.readouterr().err
        assert ("has stopped" in words) == (code == 0), words
        assert ("allspan stop --now" in words) == (code == 1), words


TEXT = """allspan: serving tiny
2026-11-23T18:35:51.170+00:00 INFO [rank 0] ready
2026-11-23T18:35:51.171+00:00 ERROR [replica 1, rank 1] it failed
Traceback (most recent call last):
2026-11-23T18:35:51.634+00:00 INFO [gateway] Started
{"time": "x", "source": "rank 1", "message": "as JSON"}
"""


def test_the_lines_of_one_rank_are_chosen_with_their_tracebacks() -> None:
    for rank, words in ((0, ["ready"]), (1, ["it failed", "Traceback", "as JSON"]), (7, [])):
        wanted = RankFilter(rank)
        lines = [line for line in TEXT.splitlines() if wanted.takes(line)]
        assert len(lines) == len(words)
        assert all(word in line for word, line in zip(words, lines, strict=True))


def test_logs_prints_the_end_of_the_log(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin("tiny")
    (run.path / LOG_FILE).write_text(TEXT)
    assert logs.run(["tiny"]) == 0
    assert capsys.readouterr().out == TEXT
    assert logs.run(["-n", "1", "--rank", "0"]) == 0
    assert capsys.readouterr().out == TEXT.splitlines(keepends=True)[1]


def test_the_copy_of_a_log_is_bounded_and_a_follower_misses_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # nobody reads standard error: the copy goes on
    copy = LogCopy(writing)
    copy.write(b"early\n")
    copy.keep_in(tmp_path / "log")
    seen = []
    line = b"x" * 1023 + b"\n"
    with closing(FollowedLog(tmp_path / "log")) as follower:
        assert follower.whole() == ["early\n"]
        for _ in range(3 * KEPT_BYTES // len(line)):
            copy.write(line)
            seen += follower.new()
    copy.close()
    os.close(writing)
    assert len(seen) == 3 * KEPT_BYTES // len(line)
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.1"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * KEPT_BYTES


def test_several_replicas_are_told_apart(begin: Begin) -> None:
    cluster = read_running(begin("tiny").path)
    assert cluster is not None
    down = replace(cluster.info, state="down")
    assert replace(cluster, replicas=(cluster.info, down)).state == "1 of 2 replicas ready"
    assert replace(cluster, replicas=(replace(cluster.info, state="stopped"),)).state == "stopping"
