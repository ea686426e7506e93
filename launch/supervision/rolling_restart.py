"""A rolling restart: the replicas of a cluster get new worlds one after another, so that the others go on serving."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from allspan.launch.console import say

POLL_S = 0.05
SETTLE_S = 0.5
"""Seconds between a replica's return and the next one's turn, in which most facades connect to it: they look for new
ranks four times a second. One that is late keeps what is refused meanwhile until it has found them."""


class Replaceable(Protocol):
    """What a rolling restart needs of a replica's supervisor."""

    @property
    def is_over(self) -> bool: ...

    @property
    def ready_epoch(self) -> int:
        """The epoch of the world that is ready now; 0 while none is."""

    def replace_world(self, drain_s: float) -> None: ...


class RollingRestart:
    """Restarts replicas in order, in a thread of its own; one restart at a time."""

    def __init__(
        self, replicas: Sequence[Replaceable], tell: Callable[[str], None] = say, settle_s: float = SETTLE_S
    ) -> None:
        self._replicas = tuple(replicas)
        self._settle_s = settle_s
        self._tell = tell
        self._under_way = threading.Event()

    def begin(self, drain_s: float) -> None:
        """Starts the restart unless one is under way. `drain_s`: seconds that running requests get in each replica
        before they go on in another one. Safe in a signal handler."""
        if self._under_way.is_set():
            self._tell("a restart is under way already")
            return
        self._under_way.set()
        threading.Thread(target=self._run, args=(drain_s,), name="rolling-restart", daemon=True).start()

    def _run(self, drain_s: float) -> None:
        done, count = 0, len(self._replicas)
        try:
            for index, replica in enumerate(self._replicas):
                if not replica.ready_epoch:
                    continue  # its supervisor is starting it anyway
                if not self._replace(replica, drain_s):
                    broken = f"the restart has ended at replica {index}, which is not ready again"
                    self._tell(f"{broken}; {done} of {count} replicas are restarted")
                    return
                done += 1
                time.sleep(self._settle_s)
            self._tell(f"restarted {done} of {count} replicas")
        finally:
            self._under_way.clear()

    def _replace(self, replica: Replaceable, drain_s: float) -> bool:
        """Replaces one replica's world, and waits until the new one is ready, which its supervisor bounds. Returns
        whether there is one."""
        before = replica.ready_epoch
        replica.replace_world(drain_s)
        while replica.ready_epoch <= before:
            if replica.is_over:
                return False
            time.sleep(POLL_S)
        return True
