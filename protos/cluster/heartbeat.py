"""A rank's heartbeat: one fixed record in a file, written again and again, read by the supervisor.

A thread of its own writes it, and it tells three things apart: the process runs (`beats` grow), its step loop comes
round (`progress` grows), there is something to do (`busy`). No clocks are compared: a reader looks for change. It is
written with one call instead of through a mapping: a full disk is then an error, where a mapping would kill the rank. A
checksum makes torn reads plain.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 0.2
"""Seconds between two heartbeats."""

LOADING, SERVING, OVER = 0, 1, 2
"""Phases: weights are read (at the start, or again); the step loop runs; the step loop has ended."""

_RECORD = struct.Struct("<4sBBxxIQQI")
_MAGIC = b"beat"


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat record. `step` counts executed plans, `progress` rounds of the step loop (idle ones, too)."""

    beats: int
    progress: int = 0
    step: int = 0
    busy: bool = False
    """A step is being executed, or work waits for one."""
    phase: int = LOADING

    def pack(self) -> bytes:
        words = (self.phase, self.busy, self.step & 0xFFFFFFFF, self.beats, self.progress)
        body = _RECORD.pack(_MAGIC, *words, 0)[:-4]
        return body + struct.pack("<I", zlib.crc32(body))

    @staticmethod
    def unpack(data: bytes) -> Beat | None:
        """Returns the record; None for bytes that are no complete record."""
        if len(data) != _RECORD.size or zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            return None
        magic, phase, busy, step, beats, progress, _ = _RECORD.unpack(data)
        return Beat(beats, progress, step, bool(busy), phase) if magic == _MAGIC else None


class BeatFile:
    """The writer's side: the file exists from construction to `remove`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, beat: Beat) -> None:
        """Raises OSError."""
        os.pwrite(self._file, beat.pack(), 0)

    def remove(self) -> None:
        """Call it once, after the last `write`."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)


def read_beat(path: Path) -> Beat | None:
    """The last record; None when there is none yet, or it is being written just now."""
    try:
        return Beat.unpack(path.read_bytes())
    except OSError:
        return None
