"""Which of a step's tokens go out at once, and which wait for more."""

from __future__ import annotations

import pytest

from allspan.protos.api.errors import InternalError
from allspan.protos.api.results import Output, RequestTimings
from allspan.worker.service.leases import MESSAGE_S, MOST_PAUSE_S, OUTPUT_S, SHARE, Lease, Leases

FIRST, SECOND = bytes(16), bytes(range(16))


def taken(lease: Lease) -> dict[bytes, list[int]]:
    return {output.request_id: list(output.token_ids) for output in lease.take()}


def test_a_first_token_a_last_one_and_an_error_go_at_once_and_take_nobody_with_them() -> None:
    lease = Lease("me", 10)
    lease.put(FIRST, Output((1,)))
    lease.put(SECOND, Output((2,), timings=RequestTimings()))
    assert taken(lease) == {SECOND: [2]}
    lease.put(FIRST, Output((3,), finish_reason="length", timings=RequestTimings()))
    assert taken(lease) == {FIRST: [1, 3]}
    lease.put(SECOND, Output((4,)))
    lease.put(SECOND, InternalError("it broke"))
    tokens, error = lease.take()
    assert (list(tokens.token_ids), error.error_message) == ([4], "it broke")
    assert lease.is_empty


def test_what_waits_goes_with_the_release_and_wakes_the_stream() -> None:
    lease = Lease("me", 10)
    lease.put(FIRST, Output((1,)))
    lease.put(FIRST, Output((2,)))
    assert not lease.news.is_set()
    assert lease.is_empty
    assert lease.release() == 1
    assert lease.news.is_set()
    assert taken(lease) == {FIRST: [1, 2]}
    assert lease.release() == 0


def test_what_a_slow_reader_has_not_taken_takes_in_what_comes_after_it() -> None:
    lease = Lease("me", 10)
    lease.put(FIRST, Output((1,)))
    lease.release()
    lease.put(FIRST, Output((2,)))
    assert taken(lease) == {FIRST: [1, 2]}


@pytest.mark.parametrize(("interval", "messages"), [(1, [[1], [2], [3], [4]]), (3, [[1, 2, 3], [4]])])
def test_with_an_interval_a_request_waits_for_so_many_tokens(interval: int, messages: list[list[int]]) -> None:
    leases = Leases(10, interval)
    lease = leases.open("me")
    seen = []
    for token in range(1, 5):
        timings = RequestTimings() if token == 4 else None
        lease.put(FIRST, Output((token,), finish_reason="length" if token == 4 else "", timings=timings))
        assert leases.release() == 0.0, "nothing waits for a pause"
        seen += taken(lease).values()
    assert seen == messages


def test_with_idle_processors_each_steps_tokens_leave_with_it() -> None:
    leases = Leases(10)
    lease = leases.open("me")
    seen = []
    for token in range(1, 5):
        lease.put(FIRST, Output((token,)))
        assert leases.release() == 0.0
        seen += taken(lease).values()
    assert seen == [[1], [2], [3], [4]]


@pytest.mark.parametrize("processors", [2, 16])
def test_on_saturated_processors_messages_take_a_share_of_them_and_no_more(processors: int) -> None:
    leases = Leases(1000, saturated=lambda: processors)
    assert leases.release() == 0.0, "nothing was sent, so the next token need not wait"
    for count in (1, 20, 1000):
        lease = leases.open(f"client of {count}")
        for number in range(count):
            lease.put(number.to_bytes(16, "big"), Output((1,)))
        pause = leases.release()
        assert len(lease.take()) == count
        cost = MESSAGE_S + count * OUTPUT_S
        assert pause == pytest.approx(min(cost / (SHARE * processors), MOST_PAUSE_S))


def test_processors_that_become_idle_end_the_pauses() -> None:
    saturated = iter([2, 0])
    leases = Leases(10, saturated=lambda: next(saturated))
    lease = leases.open("me")
    pauses = []
    for _ in range(2):
        lease.put(FIRST, Output((1,)))
        pauses.append(leases.release())
        lease.take()
    assert pauses[0] > 0.0
    assert pauses[1] == 0.0


def test_a_stream_that_ends_carries_what_waits() -> None:
    leases = Leases(10)
    lease = leases.open("me")
    lease.put(FIRST, Output((1,)))
    leases.close_all()
    assert taken(lease) == {FIRST: [1]}
    assert leases.open("late").closing
