"""Processes that hang write their stacks, also those that are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allspan.launch.supervision import stacks
from allspan.launch.supervision.watchdog import process_state
from allspan.protos.cluster.cluster_file import RankInfo
from support.waiting import wait_until

HANGS = """
import faulthandler, signal, sys, time
def hangs_here_{rank}():
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    print("ready", flush=True)
    time.sleep(60)
hangs_here_{rank}()
"""

Ranks = list[tuple[RankInfo, int]]


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    """Starts processes that sleep and write to the file "log"."""
    processes = []
    ranks: Ranks = []

    def begin(count: int) -> Ranks:
        for rank in range(count):
            with (tmp_path / "log").open("ab") as log:
                words = [sys.executable, "-c", HANGS.format(rank=rank)]
                processes.append(subprocess.Popen(words, stdout=log, stderr=log))
            ranks.append((RankInfo(rank, processes[-1].pid, "here"), os.pidfd_open(processes[-1].pid)))
        wait_until(lambda: (tmp_path / "log").read_text().count("ready") == count, what="the processes")
        return ranks

    yield begin
    for process in processes:
        process.kill()
        process.wait(10)
    for _, handle in ranks:
        os.close(handle)


def test_each_ranks_stacks_follow_its_name_and_a_stopped_one_comes_last(
    hang: Callable[[int], Ranks], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    ranks = hang(2)
    stopped = ranks[0][0].pid
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: process_state(stopped) == "T", what="the stop")
    stacks.dump(ranks, lambda: log.stat().st_size, "replica 3: ")
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"allspan: replica 3: stacks of rank 1 (pid {ranks[1][0].pid} on here, state ")
    assert said[1] == f"allspan: replica 3: stacks of rank 0 (pid {stopped} on here, state T):"
    text = log.read_text()
    assert 0 < text.index("in hangs_here_1") < text.index("in hangs_here_0")


def test_a_rank_that_writes_nothing_or_is_gone_is_not_waited_for_for_long(hang: Callable[[int], Ranks]) -> None:
    ranks = hang(2)
    os.kill(ranks[0][0].pid, signal.SIGKILL)
    began = time.monotonic()
    stacks.dump(ranks, lambda: 0)
    assert time.monotonic() - began < stacks.ALL_LIMIT_S + 1.0
