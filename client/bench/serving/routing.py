"""`allspan bench routing`: requests of a trace, sent to pretended replicas by the facades' own choice of a replica.

No model runs: a replica computes its requests one after the other at a fixed rate, and keeps the blocks of their
prompts in a cache that drops the least recently used. The facades share nothing; each of them hears what a leader
would tell, as often as an idle stream does, and chooses with the code that serves.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from allspan.client.bench.benchmark import Report
from allspan.client.cluster.routing.facade import FacadeChoice, Keys
from allspan.client.cluster.routing.knowledge import KEYS
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import ConfigError
from allspan.protos.page_keys import PageShape

BLOCK_TOKENS = 512
HEARTBEAT_S = 0.5
SPARE = 1.2
"""A replica's rate, over its share of the prompt tokens of the trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt of the trace: its length, and its full blocks' numbers, equal for equal beginnings."""

    at: float
    tokens: int
    blocks: tuple[int, ...]


def read_trace(file: Path) -> list[TraceRequest]:
    """JSON lines with `timestamp` (milliseconds), `input_length` and `hash_ids`. Raises ConfigError."""
    found: list[TraceRequest] = []
    try:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found.append(TraceRequest(row["timestamp"] / 1000, row["input_length"], tuple(row["hash_ids"])))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace is {file}, which cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--trace is {file}, whose line {len(found) + 1} is no object with timestamp, input_length and hash_ids: "
            f"{error!r}"
        ) from error
    if not found:
        raise ConfigError(f"--trace is {file}, which has no requests")
    return sorted(found, key=lambda request: request.at)


@dataclass(slots=True)
class PretendedReplica:
    """Computes prompts one after the other."""

    rate: float
    capacity: int
    """Blocks of its cache."""
    queue: deque[tuple[float, TraceRequest, list[int]]] = field(default_factory=deque)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    work: int = 0
    hit_blocks: int = 0
    free_at: float = 0.0
    current: tuple[int, list[int]] | None = None
    sequence: int = 0
    changes: dict[int, bool] = field(default_factory=dict)

    def advance(self, now: float) -> None:
        """Computes until then."""
        while True:
            if self.current is not None:
                if self.free_at > now:
                    return
                self._keep(self.current[1])
                self.current = None
            if not self.queue or max(self.queue[0][0], self.free_at) > now:
                return
            at, request, keys = self.queue.popleft()
            hits = 0
            while hits < len(keys) and keys[hits] in self.cache:
                hits += 1
            hits = min(hits, (request.tokens - 1) // BLOCK_TOKENS)
            for key in reversed(keys[:hits]):
                self.cache.move_to_end(key)
            missing = request.tokens - hits * BLOCK_TOKENS
            self.hit_blocks += hits
            self.work += missing
            self.free_at = max(at, self.free_at) + missing / self.rate
            self.current = missing, keys

    def tell(self, now: float) -> pb.StepOutputs:
        """What its leader says now."""
        queued = sum(request.tokens for _, request, _ in self.queue)
        if self.current is not None:
            queued += int(max(self.free_at - now, 0.0) * self.rate)
        message = pb.StepOutputs(load=pb.EngineLoad(queued_tokens=queued))
        if self.changes or not self.sequence:
            message.page_events.append(
                pb.PageEvents(
                    sequence=self.sequence,
                    cleared=not self.sequence,
                    page_tokens=BLOCK_TOKENS,
                    weights_version=1,
                    stored=[pb.PageStored(key=key) for key, is_stored in self.changes.items() if is_stored],
                    removed=[key for key, is_stored in self.changes.items() if not is_stored],
                )
            )
            self.changes.clear()
            self.sequence += 1
        return message

    def _keep(self, keys: Iterable[int]) -> None:
        for key in reversed(list(keys)):  # the first ones, which more share, leave last
            if key not in self.cache:
                self.changes.pop(key, None)
                self.changes[key] = True
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.capacity:
            key, _ = self.cache.popitem(last=False)
            self.changes.pop(key, None)
            self.changes[key] = False


class Simulation:
    """Replicas and facades, and the clock between them."""

    def __init__(self, trace: list[TraceRequest], replicas: int, facades: int, blocks: int, page_events: int) -> None:
        """`page_events` 0: no replica tells anything of its pages."""
        tokens, seconds = sum(request.tokens for request in trace), max(trace[-1].at - trace[0].at, 1.0)
        self._trace = trace
        self._page_events = page_events
        self.replicas = [PretendedReplica(SPARE * tokens / seconds / replicas, blocks) for _ in range(replicas)]
        self.facades = [FacadeChoice(replicas, page_events) for _ in range(facades)]
        self.decision_ns: list[int] = []
        """Processor time of each decision."""

    def run(self) -> None:
        """Sends each request of the trace by the next facade in turn."""
        shape = PageShape(BLOCK_TOKENS, "trace")
        known: dict[tuple[int, ...], list[int]] = {}
        beat, among = self._trace[0].at, (1 << len(self.replicas)) - 1
        for count, request in enumerate(self._trace):
            while beat <= request.at:
                self._beat(beat)
                beat += HEARTBEAT_S
            keys = known.get(request.blocks)
            if keys is None:
                ids = [block for block in request.blocks for _ in range(BLOCK_TOKENS)]
                keys = known[request.blocks] = list(shape.keys(ids[: request.tokens], request.tokens, "", 10**6))
            facade = self.facades[count % len(self.facades)]
            started = time.thread_time_ns()
            number, hits = next(facade.ranked(_same(keys), request.tokens, among, lambda number: 0))
            self.decision_ns.append(time.thread_time_ns() - started)
            facade.sent(number, request.tokens - hits, keys)
            replica = self.replicas[number]
            replica.queue.append((request.at, request, keys))
        for replica in self.replicas:
            replica.advance(float("inf"))

    def report(self) -> Report:
        """The rates over the whole trace."""
        blocks = sum(len(request.blocks) for request in self._trace)
        work, times = [replica.work for replica in self.replicas], sorted(self.decision_ns)
        return {
            "requests": len(self._trace),
            "hit_rate": sum(replica.hit_blocks for replica in self.replicas) / blocks,
            "work_imbalance": max(work) * len(work) / sum(work),
            "decision_us": sum(times) / len(times) / 1000,
            "decision_p50_us": times[len(times) // 2] / 1000,
            "decision_p99_us": times[len(times) * 99 // 100] / 1000,
        }

    def _beat(self, now: float) -> None:
        for number, replica in enumerate(self.replicas):
            replica.advance(now)
            message = replica.tell(now)
            if not self._page_events:
                message.ClearField("page_events")
            for facade in self.facades:
                facade.known[number].hear(message, "trace")


def _same(keys: list[int]) -> Keys:
    return lambda shape: keys


ABOUT = "Simulates the facades' choice of a replica for the requests of a trace; needs no model."


@dataclass(frozen=True)
class RoutingBenchConfig:
    """The flags of `allspan bench routing`."""

    trace: str = ""
    """Reads the requests from this file of JSON lines: timestamp (ms), input_length, hash_ids (of 512 tokens)."""
    replicas: int = 8
    """Sends the requests to this many replicas."""
    facades: int = 8
    """Sends them by this many facades in turn, which share nothing."""
    cache_blocks: int = 4000
    """Gives each replica a cache of this many blocks of 512 tokens."""
    page_events: bool = True
    """Lets the replicas tell their pages beside their load."""

    def __post_init__(self) -> None:
        for name in ("replicas", "facades", "cache_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}, must be at least 1")


def run(config: RoutingBenchConfig) -> Report:
    """Returns the hit rate, the busiest replica's work over the mean, and the processor time of a decision."""
    if not config.trace:
        raise ConfigError("--trace is missing: a file of JSON lines with timestamp, input_length and hash_ids")
    trace = read_trace(Path(config.trace))
    events = KEYS if config.page_events else 0
    simulation = Simulation(trace, config.replicas, config.facades, config.cache_blocks, events)
    simulation.run()
    return simulation.report() | {"settings": asdict(config)}


def table(report: Report) -> str:
    """Returns the report for a reader."""
    return (
        f"{report['requests']} requests: hit rate {report['hit_rate']:.3f}, busiest replica's work "
        f"{report['work_imbalance']:.3f} of the mean, {report['decision_us']:.0f} us of processor time a "
        f"decision (p50 {report['decision_p50_us']:.0f}, p99 {report['decision_p99_us']:.0f})"
    )
