"""The health of a connected world: each rank's last heartbeat, and whether the leader's step loop advances."""

from __future__ import annotations

import time

from allspan.client.cluster.state import ReplicaState
from allspan.protos.cluster.cluster_file import ClusterInfo

QUIET_S = 1.5
"""A rank that sends nothing for this long is silent; with `world.WATCH_S`, that is known within two seconds."""
STALL_S = 10.0
"""A step loop that has work and does not advance for this long stands still."""


class WorldHealth:
    """Turns heartbeats into one of the states READY, HELD and SILENT, with its cause."""

    def __init__(self, info: ClusterInfo) -> None:
        now = time.monotonic()
        self._ranks = info.ranks
        self._last_message = [now] * len(info.ranks)
        self._silent: set[int] = set()
        self._progress = (0, now)
        self._stall = ""
        self._hold = ""

    def age_s(self, rank: int) -> float:
        """Seconds since the rank's last message."""
        return time.monotonic() - self._last_message[rank]

    def describe(self, rank: int) -> str:
        """The rank's number, process and host, for messages."""
        info = self._ranks[rank]
        return f"rank {rank} (pid {info.pid} on {info.host or 'an unknown host'})"

    def assess(self) -> tuple[ReplicaState, str]:
        """The state that the ranks are in, and why it is not READY."""
        if self._silent:
            rank = min(self._silent)
            return ReplicaState.SILENT, f"{self.describe(rank)} has been silent for {self.age_s(rank):.1f} s"
        cause = self._stall or self._hold
        return (ReplicaState.HELD if cause else ReplicaState.READY), cause

    def hear(self, rank: int) -> bool:
        """Notes a message of a rank; returns whether the rank had been silent."""
        self._last_message[rank] = time.monotonic()
        if rank not in self._silent:
            return False
        self._silent.remove(rank)
        return True

    def note_leader(self, progress: int, hold: str, is_busy: bool) -> bool:
        """Notes the leader's step counter and why it admits no requests ("": it does); returns whether that changes
        the assessment. `is_busy`: this client has requests there, without which a step loop may stand still."""
        before = (self._stall, self._hold)
        last, since = self._progress
        now = time.monotonic()
        if progress != last or not is_busy:
            self._progress = (progress, now)
            self._stall = ""
        elif now - since > STALL_S:
            self._stall = f"the step loop of {self.describe(0)} has work and has not advanced for {STALL_S:g} s"
        self._hold = hold
        return (self._stall, self._hold) != before

    def reset(self) -> None:
        """Counts silence from now on: this process stood still and has not listened."""
        self._last_message = [time.monotonic()] * len(self._last_message)

    def longest_silent(self) -> int | None:
        """Finds the ranks that are silent by now; returns the one that has been silent longest, None without any."""
        now = time.monotonic()
        silent = {rank for rank, last in enumerate(self._last_message) if now - last > QUIET_S}
        self._silent |= silent
        return min(silent, key=self._last_message.__getitem__, default=None)
