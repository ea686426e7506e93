"""Writes this rank's heartbeat from a thread of its own: neither a long step nor a busy service delays it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from allspan.protos.cluster.heartbeat import LOADING, OVER, PERIOD_S, SERVING, Beat, BeatFile

logger = logging.getLogger(__name__)


class Loop(Protocol):
    """What a heartbeat reports of the step loop (`EngineCore`); reading it must take no lock."""

    @property
    def advance(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def is_busy(self) -> bool: ...


class HeartbeatWriter:
    """Writes heartbeats from construction to `stop`; until `serve` they report that the rank is loading."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be made."""
        self._file = BeatFile(path)
        self._loop: Loop | None = None
        self._phase = LOADING
        self._beats = 0
        self._failed = False
        self._stopped = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)
        self._thread.start()

    def serve(self, loop: Loop) -> None:
        """From now on the loop is expected to advance."""
        self._loop, self._phase = loop, SERVING

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Weights are read or given back meanwhile: the loop may stand for as long as a start may take."""
        before, self._phase = self._phase, LOADING
        try:
            yield
        finally:
            self._phase = before

    def end(self) -> None:
        """The loop has ended in order; what follows is bounded by the rank itself."""
        self._phase = OVER

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(5.0)
        self._file.remove()

    def _main(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        loop, phase = self._loop, self._phase
        if loop is None:
            beat = Beat(self._beats, phase=phase)
        else:
            beat = Beat(self._beats, loop.advance, loop.steps, loop.is_busy, phase)
        try:
            self._file.write(beat)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "the heartbeat cannot be written, so the supervisor may take this rank for lost: %s", error
                )
            self._failed = True
