"""Detects silent and stuck ranks by their heartbeats. An ended rank is found by its pidfd.

silent   the beats stop while the process is there: it is stopped, starved, or sits in the kernel
stuck    the beats go on, there is work, and the step loop does not come round
busy     the step loop comes round; or a step takes long, which is not (yet) too long
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from allspan.launch.console import say
from allspan.protos.cluster.cluster_file import RankInfo, heartbeat_file
from allspan.protos.cluster.heartbeat import LOADING, OVER, Beat, read_beat

LOOK_S = 0.25
"""Seconds between two checks of the heartbeats."""
SILENT_S = 2.0
"""Seconds of silence after which it is logged, and again each SAY_EVERY_S."""
SAY_EVERY_S = 5.0
MAX_GAP_S = 1.0
"""Most seconds between two checks that count against a rank: a longer gap means that this process did not run."""


@dataclass(frozen=True)
class Lost:
    """A rank that failed the watchdog's checks, and why: "was stuck for 30 s at step 7"."""

    rank: int
    words: str


@dataclass
class _Watched:
    """The state of one watched rank; times in seconds, counted while this process itself was running."""

    pid: int
    beat: Beat | None = None
    silent_s: float = 0.0
    stood_s: float = 0.0
    next_word_s: float = SILENT_S
    """Seconds of silence at which the next log line is due."""
    warned: bool = False
    """Whether a long step has been logged."""

    @property
    def step(self) -> int:
        return self.beat.step if self.beat is not None else 0


class Watchdog:
    """Checks the heartbeats of the ranks: call `look` at least every LOOK_S, from one thread."""

    def __init__(
        self,
        run_dir: Path,
        epoch: int,
        limit_s: float,
        load_limit_s: float,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s`: silence or standing still that is too long; `load_limit_s`: the same for reading weights.
        `name` begins each line of the log."""
        self._run_dir = run_dir
        self._epoch = epoch
        self._limit_s = limit_s
        self._load_limit_s = load_limit_s
        self._name = name
        self._clock = clock
        self._looked_at: float | None = None
        self._ranks: dict[int, _Watched] = {}

    def look(self, ranks: Iterable[RankInfo]) -> Lost | None:
        """The rank to blame once one has been silent or stuck for too long: a silent one before those that wait for it,
        one that is a step behind before those that are ahead."""
        now = self._clock()
        elapsed = 0.0 if self._looked_at is None else min(now - self._looked_at, MAX_GAP_S)
        self._looked_at = now
        for info in ranks:
            watched = self._ranks.setdefault(info.rank, _Watched(info.pid))
            self._update(watched, read_beat(heartbeat_file(self._run_dir, info.rank, self._epoch)), elapsed)
            self._tell(info.rank, watched)
        if not any(self._is_lost(watched) for watched in self._ranks.values()):
            return None
        least = max(self._limit_s - SILENT_S, self._limit_s / 2)
        rank = max(self._ranks, key=lambda rank: self._ranks[rank].silent_s)
        if (watched := self._ranks[rank]).silent_s >= least:
            return Lost(rank, f"was silent for {_seconds(watched.silent_s)} (state {process_state(watched.pid)})")
        stuck = {rank: watched for rank, watched in self._ranks.items() if watched.stood_s >= least}
        rank, *others = sorted(stuck, key=lambda rank: (stuck[rank].step, rank))
        too = "".join(f", rank {other} at step {stuck[other].step}" for other in others)
        return Lost(rank, self._stand(stuck[rank]) + too)

    def _update(self, watched: _Watched, beat: Beat | None, elapsed: float) -> None:
        watched.silent_s += elapsed
        before = watched.beat
        if beat is None or (before is not None and beat.beats == before.beats):
            return
        expected = beat.phase == LOADING or (beat.busy and beat.phase != OVER)
        if before is not None and expected and _place(beat) == _place(before):
            watched.stood_s += min(watched.silent_s, SILENT_S)
        else:
            watched.stood_s, watched.warned = 0.0, False
        watched.beat, watched.silent_s = beat, 0.0

    def _tell(self, rank: int, watched: _Watched) -> None:
        if watched.silent_s >= watched.next_word_s:
            watched.next_word_s += SAY_EVERY_S
            state = process_state(watched.pid)
            say(f"{self._name}rank {rank} has been silent for {watched.silent_s:.1f} s (alive, state {state})")
        elif watched.silent_s == 0.0 and watched.next_word_s > SILENT_S:
            watched.next_word_s = SILENT_S
            say(f"{self._name}rank {rank} sends heartbeats again")
        if not watched.warned and watched.stood_s >= max(self._limit(watched) / 2, SILENT_S):
            watched.warned = True
            say(f"{self._name}rank {rank} {self._stand(watched)}; its limit is {self._limit(watched):g} s")

    def _is_lost(self, watched: _Watched) -> bool:
        return watched.silent_s >= self._limit_s or watched.stood_s >= self._limit(watched)

    def _limit(self, watched: _Watched) -> float:
        """Returns the seconds that the rank may go without progress."""
        return self._load_limit_s if watched.beat is not None and watched.beat.phase == LOADING else self._limit_s

    def _stand(self, watched: _Watched) -> str:
        if watched.beat is not None and watched.beat.phase == LOADING:
            return f"was reading weights for {_seconds(watched.stood_s)} without progress"
        return f"was stuck for {_seconds(watched.stood_s)} at step {watched.step}"


def process_state(pid: int) -> str:
    """Returns the kernel's letter for a process's state (R, S, D, T, t, Z …), "?" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _place(beat: Beat) -> tuple[int, int, int]:
    """Returns the rank's position, which changes with every round of the loop."""
    return (beat.phase, beat.progress, beat.step)


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
