"""The order of a rolling restart: one replica at a time, and none after one that does not come back."""

from __future__ import annotations

from allspan.launch.supervision.rolling_restart import RollingRestart
from support.waiting import wait_until


class FakeReplica:
    """A supervisor whose next world is ready at once, later or never."""

    def __init__(self, events: list[str], name: str, epoch: int = 1, comes_back: bool = True) -> None:
        self.is_over = False
        self.ready_epoch = epoch
        self._events = events
        self._name = name
        self._comes_back = comes_back

    def replace_world(self, drain_s: float) -> None:
        self._events.append(f"{self._name} {drain_s:g}")
        if self._comes_back:
            self.ready_epoch += 1
        else:
            self.ready_epoch, self.is_over = 0, True


def restart(replicas: list[FakeReplica]) -> list[str]:
    told: list[str] = []
    RollingRestart(replicas, told.append, settle_s=0.1).begin(5.0)
    wait_until(lambda: bool(told), 5.0, "the end of the restart")
    return told


def test_replicas_are_replaced_in_order_with_the_time_to_drain() -> None:
    events: list[str] = []
    told = restart([FakeReplica(events, name) for name in "abc"])
    assert events == ["a 5", "b 5", "c 5"]
    assert told == ["restarted 3 of 3 replicas"]


def test_the_restart_ends_at_a_replica_that_does_not_come_back() -> None:
    events: list[str] = []
    told = restart([FakeReplica(events, "a", comes_back=False), FakeReplica(events, "b")])
    assert events == ["a 5"]
    assert told == ["the restart has ended at replica 0, which is not ready again; 0 of 2 replicas are restarted"]


def test_a_replica_that_is_down_is_left_to_its_supervisor() -> None:
    events: list[str] = []
    told = restart([FakeReplica(events, "a", epoch=0), FakeReplica(events, "b")])
    assert events == ["b 5"]
    assert told == ["restarted 1 of 2 replicas"]
