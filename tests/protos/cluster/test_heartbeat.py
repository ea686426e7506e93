"""The record by which a rank says that it lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.protos.cluster.heartbeat import SERVING, Beat, BeatFile, read_beat

BEAT = Beat(beats=2**40, progress=2**33, step=2**31, busy=True, phase=SERVING)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = BeatFile(tmp_path / "beat")
    assert read_beat(tmp_path / "beat") is None, "nothing is written yet"
    for beat in (BEAT, Beat(1)):
        file.write(beat)
        assert read_beat(tmp_path / "beat") == beat
    assert (tmp_path / "beat").stat().st_mode & 0o777 == 0o600
    file.remove()
    assert read_beat(tmp_path / "beat") is None


@pytest.mark.parametrize("index", range(len(BEAT.pack())))
def test_a_torn_record_is_none(index: int) -> None:
    data = bytearray(BEAT.pack())
    data[index] ^= 1
    assert Beat.unpack(bytes(data)) is None
    assert Beat.unpack(BEAT.pack()[:index]) is None
