"""What a result stream brings reaches its readers with its step while they keep up, and joined while they lag."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from allspan.client.cluster.pacing import JOIN_SHARE, LEAST_JOIN_S, OutputPacer
from allspan.protos import worker_pb2 as pb

STEP_S = 0.01
NAMES = (b"a" * 16, b"b" * 16, b"c" * 16)


class FakeLoop:
    """An event loop and its clock. A reader that was woken runs in the next turn for `reader_s`, and then counts what
    it has been given since it ran last as one chunk."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reader_s = 0.0
        self.delivered: dict[bytes, list[int]] = {}
        self.chunks: dict[bytes, list[list[int]]] = {}
        self._unread: dict[bytes, list[int]] = {}
        self._ready: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._numbers = itertools.count()
        self.pacer = OutputPacer(self._deliver, self, lambda: self.now)  # type: ignore[arg-type]

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self._ready.append((callback, arguments))

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self.now + delay, next(self._numbers), timer))
        return timer

    def run_until(self, moment: float) -> None:
        """Runs turns until nothing is left to do before `moment`; slow readers may take longer."""
        while True:
            while self._timers and self._timers[0][0] <= self.now:
                timer = heapq.heappop(self._timers)[2]
                if not timer.is_cancelled:
                    timer.callback()
            if self._ready:
                ready, self._ready = self._ready, []
                for callback, arguments in ready:
                    callback(*arguments)
            elif self._timers and self._timers[0][0] <= moment:
                self.now = max(self.now, self._timers[0][0])
            else:
                break
        self.now = max(self.now, moment)

    def _deliver(self, output: pb.RequestOutput) -> None:
        name = output.request_id
        self.delivered.setdefault(name, []).extend(output.token_ids)
        if name not in self._unread:
            self.call_soon(self._read, name)
        self._unread.setdefault(name, []).extend(output.token_ids)

    def _read(self, name: bytes) -> None:
        self.now += self.reader_s
        self.chunks.setdefault(name, []).append(self._unread.pop(name))


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def output(name: bytes, token: int, **fields: Any) -> pb.RequestOutput:
    return pb.RequestOutput(request_id=name, token_ids=[token], **fields)


def play(loop: FakeLoop, steps: int, names: Sequence[bytes] = NAMES) -> None:
    """Steps that end each STEP_S; a message that comes while the loop is at work is read when that is done."""
    start = loop.now
    for step in range(steps):
        loop.run_until(start + step * STEP_S)
        loop.pacer.put([output(name, step) for name in names])
    loop.run_until(loop.now + 1.0)


def test_readers_that_keep_up_get_one_message_a_step_without_delay() -> None:
    loop = FakeLoop()
    loop.reader_s = STEP_S / 4
    moments = []
    for step in range(20):
        loop.pacer.put([output(name, step) for name in NAMES])
        moments.append(all(loop.delivered[name][-1] == step for name in NAMES))
        loop.run_until(100.0 + (step + 1) * STEP_S)
    assert all(moments)
    assert loop.chunks == {name: [[step] for step in range(20)] for name in NAMES}


def test_a_lagging_reader_gets_several_steps_a_message_and_each_token_once() -> None:
    loop = FakeLoop()
    loop.reader_s = STEP_S  # three of them take three steps' time for one
    play(loop, 60)
    for name in NAMES:
        assert loop.delivered[name] == list(range(60))
        assert 60 / 8 <= len(loop.chunks[name]) <= 60 / 2
    assert loop.now - 100.0 < 60 * STEP_S * 2 + 1.0, "who joins more takes no longer for it"


def test_a_loop_that_has_caught_up_gives_each_step_its_own_message_again() -> None:
    loop = FakeLoop()
    loop.reader_s = STEP_S
    play(loop, 20)
    loop.reader_s = 0.0
    before = len(loop.chunks[NAMES[0]])
    play(loop, 21)
    assert len(loop.chunks[NAMES[0]]) - before == 21


def test_a_first_token_a_last_one_and_an_error_do_not_wait_and_come_after_what_does() -> None:
    loop = FakeLoop()
    a, b, c = NAMES
    loop.pacer.put([output(a, 1)])
    loop.pacer.put([output(a, 2), output(b, 1)])
    assert loop.delivered == {a: [1]}, "the readers of the first message have not run"
    loop.pacer.put([output(a, 3, finish_reason="length")])
    assert loop.delivered == {a: [1, 2, 3]}
    loop.pacer.put([output(c, 1, timings=pb.RequestTimings(ttft_s=0.1))])
    assert loop.delivered[c] == [1]
    loop.pacer.put([output(b, 2, error_code="unavailable")])
    assert loop.delivered[b] == [1, 2]


def test_what_is_held_waits_no_longer_than_the_readers_rest() -> None:
    loop = FakeLoop()
    loop.reader_s = 0.04
    loop.pacer.put([output(NAMES[0], 1)])
    loop.run_until(loop.now)
    held_at = loop.now
    loop.pacer.put([output(NAMES[0], 2)])
    assert loop.delivered[NAMES[0]] == [1]
    loop.run_until(held_at + max(JOIN_SHARE * 0.04, LEAST_JOIN_S))
    assert loop.delivered[NAMES[0]] == [1, 2]


def test_a_flush_gives_everything_at_once_and_nothing_twice() -> None:
    loop = FakeLoop()
    loop.pacer.put([output(NAMES[0], 1)])
    loop.pacer.put([output(NAMES[0], 2)])
    loop.pacer.flush()
    assert loop.delivered[NAMES[0]] == [1, 2]
    loop.run_until(loop.now + 1.0)
    assert loop.delivered[NAMES[0]] == [1, 2]


entries = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["", "", "", "timings"])), max_size=4)
events = st.tuples(entries, st.sampled_from([0.0, 0.0002, 0.001, 0.01]), st.sampled_from([0.0, 0.0005, 0.02]))


@given(st.lists(events, max_size=40))
def test_however_messages_come_each_token_is_delivered_once_and_in_order(played: list[Any]) -> None:
    loop = FakeLoop()
    sent: dict[bytes, list[int]] = {}
    numbers = itertools.count()
    for outputs, pause, reader_s in played:
        loop.reader_s = reader_s
        message = []
        for name, kind in outputs:
            token = next(numbers)
            sent.setdefault(name, []).append(token)
            message.append(output(name, token, **({"timings": pb.RequestTimings()} if kind else {})))
        loop.pacer.put(message)
        for made in message:
            if made.HasField("timings"):
                seen = loop.delivered[made.request_id]
                assert made.token_ids[0] in seen, "an urgent output does not wait"
        loop.run_until(loop.now + pause)
    loop.run_until(loop.now + 10.0)
    assert loop.delivered == sent
    assert {name: list(itertools.chain(*chunks)) for name, chunks in loop.chunks.items()} == sent
