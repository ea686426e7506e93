"""A rank's heartbeat goes on whatever its step loop does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from allspan.protos.cluster.heartbeat import LOADING, OVER, SERVING, Beat, BeatFile, read_beat
from allspan.worker.process import heartbeat_writer as heart_module
from allspan.worker.process.heartbeat_writer import HeartbeatWriter
from support.waiting import wait_until


class Loop:
    advance = 7
    steps = 3
    is_busy = True


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(heart_module, "PERIOD_S", 0.01)
    return tmp_path / "beat-0.e1"


def newest(path: Path) -> Beat:
    """One that was begun after this call."""
    last = read_beat(path)
    seen = last.beats if last else 0
    wait_until(lambda: (beat := read_beat(path)) is not None and beat.beats > seen + 1, what="a beat")
    beat = read_beat(path)
    assert beat is not None
    return beat


def test_it_beats_from_the_start_and_tells_the_phase(path: Path) -> None:
    heart = HeartbeatWriter(path)
    assert read_beat(path) is not None, "the first is written before anything else happens"
    assert newest(path).phase == LOADING
    heart.serve(Loop())
    beat = newest(path)
    assert (beat.phase, beat.progress, beat.step, beat.busy) == (SERVING, 7, 3, True)
    with heart.loading():
        assert newest(path).phase == LOADING
    assert newest(path).phase == SERVING
    heart.end()
    assert newest(path).phase == OVER
    heart.stop()
    assert not path.exists()


def test_a_long_step_counts_as_progress_while_its_ops_go_on(path: Path) -> None:
    ops = iter(range(1, 1_000_000))

    class LongStep(Loop):
        @property
        def advance(self) -> int:  # type: ignore[override]
            return next(ops)

    heart = HeartbeatWriter(path)
    try:
        heart.serve(LongStep())
        assert newest(path).progress < newest(path).progress
    finally:
        heart.stop()


def test_a_beat_that_cannot_be_written_is_told_once_and_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def full(self: BeatFile, beat: Beat) -> None:
        tries.append(beat)
        raise OSError(28, "No space left on device")

    heart = HeartbeatWriter(path)
    try:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(BeatFile, "write", full)
            wait_until(lambda: len(tries) > 3, what="more tries")
        assert ["No space left" in record.message for record in caplog.records] == [True]
        assert newest(path).beats > 3
    finally:
        heart.stop()
