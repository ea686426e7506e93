"""When processors count as saturated."""

from __future__ import annotations

import os
from collections.abc import Sequence

from allspan.worker.process.processors import LEAST_IDLE, ProcessorLoad, read_counts

CPUS = (0, 1)


class Machine:
    """Counts as a kernel would: 100 ticks a second and processor, of which `idle` processors are idle."""

    def __init__(self) -> None:
        self.now = 50.0
        self.ticks = self.idle_ticks = 0.0

    def run(self, seconds: float, idle: float) -> None:
        self.now += seconds
        self.ticks += 100 * len(CPUS) * seconds
        self.idle_ticks += 100 * idle * seconds

    def read(self, cpus: Sequence[int]) -> tuple[float, float]:
        assert cpus == CPUS
        return self.idle_ticks, self.ticks

    def load(self) -> ProcessorLoad:
        return ProcessorLoad(CPUS, self.read, lambda: self.now)


def test_processors_are_saturated_while_hardly_any_is_idle() -> None:
    machine = Machine()
    load = machine.load()
    assert load.saturated == 0, "nothing is measured yet"
    seen = []
    for idle in (1.5, 0.1, 0.1, LEAST_IDLE + 0.1):
        machine.run(0.6, idle)
        seen.append(load.saturated)
    assert seen == [0, 2, 2, 0]


def test_a_measurement_lasts_long_enough_to_mean_something() -> None:
    machine = Machine()
    load = machine.load()
    assert load.saturated == 0
    machine.run(0.1, 0.0)
    assert load.saturated == 0
    machine.run(0.5, 0.0)
    assert load.saturated == 2


def test_a_time_in_which_nobody_asked_says_nothing_about_now() -> None:
    machine = Machine()
    load = machine.load()
    assert load.saturated == 0
    machine.run(0.6, 0.0)
    assert load.saturated == 2
    machine.run(60.0, 2.0)
    assert load.saturated == 2, "streams that begin again meet the load that they met last"
    machine.run(0.6, 2.0)
    assert load.saturated == 0


def test_a_system_that_does_not_say_has_idle_processors() -> None:
    now = [0.0]
    load = ProcessorLoad(CPUS, lambda cpus: None, lambda: now[0])
    for _ in range(3):
        now[0] += 0.6
        assert load.saturated == 0


def test_the_kernels_counts_are_of_the_processors_that_were_asked_for() -> None:
    cpu = min(os.sched_getaffinity(0))
    one, none = read_counts((cpu,)), read_counts(())
    assert one is not None
    assert 0 <= one[0] <= one[1] > 0
    assert none == (0.0, 0.0)
