"""Timing: every side in a CUDA graph of its own, over inputs that take turns and that no cache holds, side after side
and back again, by medians. A case that is wrong is not timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from allspan.kernels.bench.case import Built, Case, Launch

LEAST_LAUNCHES = 20
"""Fewest launches of a graph, except for a side that would take longer for them than MOST_GRAPH_US."""
LEAST_ROUND_US, MOST_GRAPH_US = 2000.0, 10_000.0
COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Figure:
    """The time of one side: microseconds a launch, and how far rounds are apart, by the median."""

    side: str
    is_ours: bool
    us: float = 0.0
    spread: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Result:
    """The result of one case. `wrong`: what is not right (nothing was timed then); `left_out`: why it was not tried."""

    group: str
    name: str
    num_bytes: int = 0
    flops: int = 0
    figures: Sequence[Figure] = field(default_factory=tuple)
    wrong: str = ""
    left_out: str = ""
    kernel: str = ""
    """The kernel that was chosen, where there are several for one op."""

    @property
    def ours(self) -> Figure | None:
        return min((f for f in self.figures if f.is_ours and not f.refused), key=lambda f: f.us, default=None)

    @property
    def best_peer(self) -> Figure | None:
        return min((f for f in self.figures if not f.is_ours and not f.refused), key=lambda f: f.us, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best of the others."""
        ours, peer = self.ours, self.best_peer
        return peer.us / ours.us if ours and peer else None


class Clock(Protocol):
    def times(self, sides: Mapping[str, Launch], sets: int, rounds: int) -> dict[str, list[float]]:
        """Microseconds of a launch of each side, in every round."""
        ...


class GraphClock:
    def times(self, sides: Mapping[str, Launch], sets: int, rounds: int) -> dict[str, list[float]]:
        launches = {name: max(_warm(run, sets), sets) for name, run in sides.items()}
        graphs = {name: _captured(run, sets, launches[name]) for name, run in sides.items()}
        replays = {name: self._replays(graph) for name, graph in graphs.items()}
        found: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(rounds):
            for name in list(graphs)[:: -1 if turn % 2 else 1]:
                found[name].append(_timed(graphs[name].replay, replays[name]) / launches[name])
        return found

    def _replays(self, graph: Any) -> int:
        return max(1, round(LEAST_ROUND_US / max(1.0, _timed(graph.replay, 1))))


def _warm(run: Launch, sets: int) -> int:
    """How many launches make a graph. Kernels compile, and libraries choose theirs, outside of what is captured."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            run(i)
        torch.cuda.synchronize()
        once = _timed(lambda: run(0), 1)
    return max(1, min(LEAST_LAUNCHES, int(MOST_GRAPH_US / max(1.0, once))))


def _captured(run: Launch, sets: int, launches: int) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i % sets)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _timed(run: Callable[[], object], times: int) -> float:
    """Microseconds of a run, on the current stream."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / times


def measure(cases: Sequence[Case], device: str, clock: Clock, rounds: int, memory_bytes: float) -> Iterator[Result]:
    for case in cases:
        if case.num_bytes > memory_bytes / 2:
            yield Result(case.group, case.name, left_out=f"its {case.num_bytes / 1e9:.0f} GB do not fit")
            continue
        try:
            built = case.build(device)
        except Exception as error:  # whatever a device lacks; the other cases are still of use
            yield Result(case.group, case.name, left_out=_words(error))
            continue
        yield _measured(case, built, clock, rounds)


def _measured(case: Case, built: Built, clock: Clock, rounds: int) -> Result:
    for name in built.ours:
        if wrong := _wrong(built, name):
            return Result(case.group, case.name, wrong=f"{name}: {wrong}")
    sides, refused = dict(built.ours), []
    for name, prepare in built.peers.items():
        try:
            run = prepare()
            run(0)
            sides[name] = run
        except Exception as error:  # another library may raise what it likes
            refused.append(Figure(name, False, refused=_words(error)))
    times = clock.times(sides, built.sets, rounds)
    figures = [_figure(name, name in built.ours, found) for name, found in times.items()]
    wrong = next((f"{name}, after it was timed: {why}" for name in built.ours if (why := _wrong(built, name))), "")
    return Result(case.group, case.name, built.num_bytes, built.flops, (*figures, *refused), wrong, kernel=built.kernel)


def _wrong(built: Built, name: str) -> str:
    try:
        built.check(name)
    except AssertionError as error:
        return _words(error) or "not right"
    return ""


def _figure(name: str, is_ours: bool, times: list[float]) -> Figure:
    middle = statistics.median(times)
    return Figure(name, is_ours, middle, (max(times) - min(times)) / middle)


def _words(error: BaseException) -> str:
    """Its first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def roofs(clock: Clock, device: str) -> dict[str, float]:
    """What this device does in this run: a copy of a GiB, bytes read and written, and a bfloat16 product, by cuBLAS."""
    a = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device=device)
    b = torch.empty_like(a)
    x, y = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(x)
    # What a graph has of `copy_` is done by the copy engine, at 60 % of what a kernel reaches.
    sides: dict[str, Launch] = {"copy": lambda i: torch.neg(a, out=b), "product": lambda i: torch.mm(x, y, out=out)}
    us = {name: statistics.median(found) for name, found in clock.times(sides, 1, 5).items()}
    return {"copy_tb_s": 2 * COPY_BYTES / us["copy"] / 1e6, "tflops": 2 * MATMUL_SIZE**3 / us["product"] / 1e6}
