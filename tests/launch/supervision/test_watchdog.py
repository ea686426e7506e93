"""Silent, stuck and busy, told by heartbeats and a clock of the test's own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from allspan.launch.supervision.watchdog import LOOK_S, Lost, Watchdog
from allspan.protos.cluster.cluster_file import RankInfo, heartbeat_file
from allspan.protos.cluster.heartbeat import LOADING, OVER, SERVING, Beat, BeatFile

IDLE = Beat(1, progress=1, step=5, phase=SERVING)


class Ranks:
    """Ranks of one watchdog; those in `beating` write a beat before each look."""

    def __init__(self, folder: Path, count: int = 2, limit_s: float = 30.0, load_limit_s: float = 600.0) -> None:
        self.now = 100.0
        self.watchdog = Watchdog(folder, 3, limit_s, load_limit_s, clock=lambda: self.now)
        self.infos = [RankInfo(rank, os.getpid(), "here") for rank in range(count)]
        self.files = [BeatFile(heartbeat_file(folder, rank, 3)) for rank in range(count)]
        self.beats = [IDLE] * count
        self.beating = set(range(count))
        self.moving = set(range(count))

    def pass_time(self, seconds: float, step: float = LOOK_S) -> Lost | None:
        """Until a rank is lost, at most `seconds`."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            for rank in self.beating:
                beat = self.beats[rank]
                moved = beat.progress + (rank in self.moving)
                self.beats[rank] = replace(beat, beats=beat.beats + 1, progress=moved)
                self.files[rank].write(self.beats[rank])
            if lost := self.watchdog.look(self.infos):
                return lost
        return None


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_ranks_that_beat_and_move_are_never_lost_nor_spoken_of(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.beats[0] = replace(IDLE, busy=True)
    assert ranks.pass_time(500) is None
    assert capsys.readouterr().err == ""


def test_a_silence_is_told_at_2_s_and_each_5_s_and_lost_at_the_limit(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.pass_time(1)
    ranks.beating = {0}
    began = ranks.now
    lost = ranks.pass_time(100)
    assert lost == Lost(1, "was silent for 30 s (state R)")
    assert 30 <= ranks.now - began <= 31
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "allspan: rank 1 has been silent for 2.0 s (alive, state R)"
    assert [line.split()[7] for line in lines] == ["2.0", "7.0", "12.0", "17.0", "22.0", "27.0"]


def test_a_silence_below_the_limit_is_forgotten(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        ranks.beating = {0}
        assert ranks.pass_time(20) is None
        ranks.beating = {0, 1}
        assert ranks.pass_time(2) is None
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("allspan: rank 1 has been silent for 2.0 s (alive, state R)") == 3
    assert lines.count("allspan: rank 1 sends heartbeats again") == 3


def test_a_rank_that_never_beat_is_silent(ranks: Ranks) -> None:
    ranks.beating = {0}
    lost = ranks.pass_time(100)
    assert lost is not None
    assert lost.rank == 1


def test_a_busy_loop_that_stands_is_stuck_at_its_step(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.pass_time(1)
    ranks.beats[0] = replace(ranks.beats[0], busy=True, step=41)
    ranks.moving = {1}
    began = ranks.now
    assert ranks.pass_time(100) == Lost(0, "was stuck for 30 s at step 41")
    assert 30 <= ranks.now - began <= 31
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 0 was stuck for 15 s at step 41" in line


def test_the_rank_that_is_behind_is_blamed_before_those_that_wait_for_it(ranks: Ranks) -> None:
    ranks.pass_time(1)
    ranks.beats = [replace(beat, busy=True, step=step) for beat, step in zip(ranks.beats, (9, 8), strict=True)]
    ranks.moving = set()
    assert ranks.pass_time(100) == Lost(1, "was stuck for 30 s at step 8, rank 0 at step 9")


def test_a_silent_rank_is_blamed_before_those_that_wait_for_it(ranks: Ranks) -> None:
    ranks.pass_time(1)
    ranks.beats = [replace(beat, busy=True, step=8) for beat in ranks.beats]
    ranks.moving = set()
    ranks.pass_time(0.5)  # the other's loop stands a little before the beats stop
    ranks.beating = {0}
    lost = ranks.pass_time(100)
    assert lost is not None
    assert lost.rank == 1
    assert "silent" in lost.words


def test_steps_that_take_long_but_end_are_busy_not_stuck(ranks: Ranks) -> None:
    ranks.beats = [replace(IDLE, busy=True)] * 2
    for _ in range(5):
        ranks.moving = set()
        assert ranks.pass_time(28) is None
        ranks.moving = {0, 1}
        assert ranks.pass_time(0.5) is None


def test_an_idle_loop_may_stand(ranks: Ranks) -> None:
    ranks.moving = set()
    assert ranks.pass_time(100) is None


def test_reading_weights_may_take_as_long_as_a_start(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, load_limit_s=200)
    ranks.beats = [replace(IDLE, phase=LOADING)] * 2
    ranks.moving = set()
    assert ranks.pass_time(190) is None
    lost = ranks.pass_time(20)
    assert lost is not None
    assert "reading weights for 200 s" in lost.words


def test_a_silence_counts_while_weights_are_read(ranks: Ranks) -> None:
    ranks.beats = [replace(IDLE, phase=LOADING)] * 2
    ranks.pass_time(1)
    ranks.beating = {0}
    assert ranks.pass_time(31) == Lost(1, "was silent for 30 s (state R)")


def test_a_loop_that_has_ended_may_stand(ranks: Ranks) -> None:
    ranks.beats = [replace(IDLE, phase=OVER, busy=True)] * 2
    ranks.moving = set()
    assert ranks.pass_time(100) is None


def test_what_stood_still_was_the_watchdog_itself(ranks: Ranks) -> None:
    """The whole machine was suspended, or this process was: nobody is to blame for it."""
    ranks.pass_time(1)
    ranks.beats[0] = replace(ranks.beats[0], busy=True)
    ranks.moving = {1}
    ranks.now += 3600
    assert ranks.pass_time(20) is None
    ranks.beating = {0}
    ranks.moving = {0, 1}
    ranks.now += 3600
    assert ranks.pass_time(20) is None
