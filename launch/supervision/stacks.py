"""Makes every rank write the Python stacks of all its threads into the log, before a world that hangs is ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from allspan.launch.console import say
from allspan.launch.supervision.watchdog import process_state
from allspan.protos.cluster.cluster_file import RankInfo

RANK_LIMIT_S = 1.0
ALL_LIMIT_S = 4.0
QUIET_S = 0.15
"""A dump is over when nothing has come for so long."""


def dump(ranks: Sequence[tuple[RankInfo, int]], received: Callable[[], int], name: str = "") -> None:
    """`ranks`: each with its pidfd; faulthandler answers SIGUSR1 there. `received` counts the bytes of their output.

    One after the other, so that the stacks of two do not mix; stopped ones come last and are made to go on, which is
    what lets them write, and lets the others go on. Takes ALL_LIMIT_S and a little at most.
    """
    deadline = time.monotonic() + ALL_LIMIT_S
    states = {info.rank: process_state(info.pid) for info, _ in ranks}
    for info, handle in sorted(ranks, key=lambda entry: (states[entry[0].rank] in "Tt", entry[0].rank)):
        say(f"{name}stacks of rank {info.rank} (pid {info.pid} on {info.host}, state {states[info.rank]}):")
        before = received()
        with suppress(ProcessLookupError):  # it died meanwhile
            signal.pidfd_send_signal(handle, signal.SIGUSR1)
            if states[info.rank] in "Tt":
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            _await_quiet(received, before, min(time.monotonic() + RANK_LIMIT_S, deadline))


def _await_quiet(received: Callable[[], int], before: int, deadline: float) -> None:
    """Waits until output has come and ceased."""
    last, since = before, time.monotonic()
    while (now := time.monotonic()) < deadline and (last == before or now - since < QUIET_S):
        time.sleep(0.02)
        if (count := received()) != last:
            last, since = count, time.monotonic()
