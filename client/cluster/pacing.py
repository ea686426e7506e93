"""The pacing of outputs from a result stream to their requests: with their message, or joined while this loop lags."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from allspan.protos import worker_pb2 as pb

JOIN_SHARE = 0.25
LEAST_JOIN_S = 0.001
"""The readers have this share of the time that they took for the last message as a rest, or LEAST_JOIN_S if that is
longer. A message that comes within the rest has waited for them, and more may be waiting behind it: they are gathered
for as long as the rest is, and delivered together."""


class OutputPacer:
    """Delivers each output exactly once, and a request's outputs in order. Must be used on `loop`.

    While the loop keeps up, a message is delivered when it comes. A loop that is slower than the steps finds the next
    message waiting when the readers of the last one have run; then messages are joined, so that each reader runs once
    for several steps. A request's first and last tokens and its error do not wait.
    """

    def __init__(
        self,
        deliver: Callable[[pb.RequestOutput], None],
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` wakes the reader of an output by `call_soon` of `loop`."""
        self._deliver = deliver
        self._loop = loop
        self._clock = clock
        self._held: dict[bytes, list[pb.RequestOutput]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._are_readers_running = False
        self._began = self._ended = self._clock()
        self._rest_s = 0.0

    def put(self, outputs: Iterable[pb.RequestOutput]) -> None:
        """Takes a message's outputs, and delivers them now, or soon together with later ones."""
        is_lagging = self._are_readers_running or self._clock() - self._ended < self._rest_s
        if not is_lagging and self._timer is None:
            self._watch_readers()
            for output in outputs:
                self._deliver(output)
            return
        for output in outputs:
            if is_urgent(output):
                for earlier in self._held.pop(output.request_id, ()):
                    self._deliver(earlier)
                self._deliver(output)
            else:
                self._held.setdefault(output.request_id, []).append(output)
        if self._held and self._timer is None:
            self._timer = self._loop.call_later(max(self._rest_s, LEAST_JOIN_S), self.flush)

    def flush(self) -> None:
        """Delivers the outputs that are held back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, {}
        self._watch_readers()
        for outputs in held.values():
            for output in outputs:
                self._deliver(output)

    def _watch_readers(self) -> None:
        """Measures how long the delivery takes that begins now. A reader runs in the loop's next turn, and writes what
        it has read in the turn after that."""
        if not self._are_readers_running:
            self._are_readers_running = True
            self._began = self._clock()
            self._loop.call_soon(self._in_next_turn)

    def _in_next_turn(self) -> None:
        self._loop.call_soon(self._in_turn_after)

    def _in_turn_after(self) -> None:
        self._loop.call_soon(self._on_readers_ran)

    def _on_readers_ran(self) -> None:
        self._are_readers_running = False
        self._ended = self._clock()
        self._rest_s = max(JOIN_SHARE * (self._ended - self._began), LEAST_JOIN_S)


def is_urgent(output: pb.RequestOutput) -> bool:
    """Returns whether this is a request's first output with a token, its last one, or its error."""
    return bool(output.finish_reason or output.error_code) or output.HasField("timings")
