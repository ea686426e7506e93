"""The order in which requests get a row, and when their time is over."""

import random

from allspan.protos.api.options import RequestOptions
from allspan.worker.scheduler.counters import WINDOW_S, Rate
from allspan.worker.scheduler.waiting import Deadlines, WaitingQueue
from support.cores import request


def numbered(order, priority=0):
    one = request(order, [1])
    one.options = RequestOptions(priority=priority)
    one.order = order
    return one


def test_by_priority_then_by_arrival_whatever_order_they_come_and_go_in():
    rng = random.Random(1)
    waiting = [numbered(order, rng.randint(-2, 2)) for order in range(50)]
    queue = WaitingQueue()
    for one in rng.sample(waiting, 50):
        queue.add(one)
    for one in rng.sample(waiting, 20):
        queue.remove(one)
        waiting.remove(one)
    expected = sorted(waiting, key=lambda one: (one.options.priority, one.order))
    assert queue.requests() == expected == [queue[i] for i in range(len(queue))]


def test_only_open_requests_expire_each_once():
    deadlines = Deadlines()
    requests = {one.request_id: one for one in map(numbered, range(4))}
    for order, one in enumerate(requests.values()):
        deadlines.add(one, 10.0 - order)
    first = requests.pop(numbered(3).request_id)
    assert deadlines.pop_expired(6.9, requests) == []
    assert deadlines.pop_expired(8.0, requests) == [requests[numbered(2).request_id]]
    assert deadlines.pop_expired(8.5, requests) == []
    again = numbered(9)
    again.request_id = numbered(1).request_id
    requests[again.request_id] = again
    assert deadlines.pop_expired(99.0, requests) == [requests[numbered(0).request_id]], "an id used again is another's"
    assert first not in requests.values()
    assert not deadlines


def test_deadlines_of_requests_that_ended_are_not_kept():
    deadlines = Deadlines()
    for order in range(1000):
        deadlines.add(numbered(order), 1e6)
        deadlines.pop_expired(0.0, {})
    assert len(deadlines._heap) <= 65


def test_a_rate_is_of_the_last_seconds():
    rate = Rate()
    assert rate.per_second(5.0) == 0.0
    for second in range(30):
        rate.count(100.0 + second, 7)
        rate.count(100.5 + second, 3)
    assert abs(rate.per_second(130.0) - 10.0) < 1.5
    assert rate.per_second(130.0 + 2 * WINDOW_S) == 0.0
