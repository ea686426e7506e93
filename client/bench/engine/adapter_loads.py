"""`allspan bench adapter-loads`: what loading a LoRA adapter does to requests that run, and how soon it can be used.

Requests without adapters decode all the time, and the moments at which steps bring their tokens are noted. The first of
--lora-modules is loaded again and again beside them under another name, asked for one token, and unloaded. What is told
is the longest pause of the running requests in each load, beside the pauses while nothing is loaded.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import greedy, random_prompt
from allspan.client.bench.report import columns
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import RequestHandle, ResultQueue

NAME = "loaded-by-bench"
"""The name under which the adapter is loaded."""
QUIET_S = 2.0
"""Seconds of steps before the first load."""
BETWEEN_S = 0.2
LOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class AdapterLoadsConfig:
    """The settings of the benchmark of loading adapters."""

    running: int = 2
    """Decodes so many requests meanwhile."""
    input_len: int = 16
    """Sets the prompt tokens of each request; they are drawn at random."""
    context: int = 4096
    """Sets how many tokens the running requests may have: they must outlast all loads."""
    loads: int = 10
    """Loads, asks and unloads so many times."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        at_least(self, {"running": 1, "input_len": 1, "context": 64, "loads": 1})


@dataclass(frozen=True, slots=True)
class Load:
    """One load: when it was asked for, answered, first used and unloaded."""

    began: float
    loaded: float
    used: float
    unloaded: float


class Steps:
    """Notes when the running requests get tokens, on threads of its own."""

    def __init__(self, engine: ClientEngine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        started = [engine.start_request(prompt, greedy(max_tokens)) for prompt in prompts]
        self.times: list[list[float]] = [[] for _ in started]
        self._engine = engine
        self._handles: list[RequestHandle] = [handle for handle, _ in started]
        self._threads = [
            threading.Thread(target=self._read, args=(queue, times), daemon=True)
            for (_, queue), times in zip(started, self.times, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def are_over(self) -> bool:
        return not all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        for handle in self._handles:
            self._engine.release_request(handle)
        for thread in self._threads:
            thread.join(10.0)

    def _read(self, queue: ResultQueue, times: list[float]) -> None:
        for _ in queue:
            times.append(time.perf_counter())


def prepare(config: AdapterLoadsConfig, options: Options) -> Options:
    """Returns the options with room for one more adapter. ConfigError without any."""
    if not options.get("lora_modules"):
        raise ConfigError("--lora-modules is missing: name the adapter that is to be loaded, NAME=FOLDER")
    slots = len(options["lora_modules"]) + 1
    options = {"max_loras": slots, "enable_prefix_caching": False, "stream_interval": 1, **options}
    return with_context(options, config.context, "--context")


def measure(engine: ClientEngine, config: AdapterLoadsConfig, options: Options) -> Report:
    draw, adapter = random.Random(config.seed), engine.list_loras()[0]
    prompts = [random_prompt(draw, engine, config.input_len) for _ in range(config.running + 1)]
    engine.generate([prompts[0]], greedy(1))  # what the first request of all prepares
    steps = Steps(engine, prompts[1:], config.context - config.input_len)
    before = _rss(engine)
    loads: list[Load] = []
    try:
        time.sleep(QUIET_S)
        for _ in range(config.loads):
            began = time.perf_counter()
            engine.load_lora(NAME, adapter.path, LOAD_TIMEOUT_S)
            loaded = time.perf_counter()
            engine.generate([prompts[0]], greedy(1), RequestOptions(adapter=NAME))
            used = time.perf_counter()
            engine.unload_lora(NAME, LOAD_TIMEOUT_S)
            loads.append(Load(began, loaded, used, time.perf_counter()))
            time.sleep(BETWEEN_S)
        if steps.are_over:
            raise ConfigError(f"--context is {config.context}, too short for {config.loads} loads: the requests ended")
    finally:
        steps.stop()
    return summary(steps.times, loads) | {"rss_growth_bytes": _rss(engine) - before}


def summary(times: Sequence[Sequence[float]], loads: Sequence[Load]) -> Report:
    """What the moments of steps and of loads come to, in milliseconds."""
    quiet = [later - earlier for each in times for earlier, later in pairwise(each) if later < loads[0].began]
    if not quiet:
        raise ConfigError("the running requests had no steps before the first load: give them longer prompts to decode")
    pauses = [
        max(
            (later - earlier for each in times for earlier, later in pairwise(each) if _meet(earlier, later, load)),
            default=0.0,
        )
        for load in loads
    ]
    step = statistics.median(quiet)
    return {
        "step_ms": 1e3 * step,
        "longest_quiet_pause_ms": 1e3 * max(quiet),
        "load_ms": _spread([load.loaded - load.began for load in loads]),
        "first_token_ms": _spread([load.used - load.loaded for load in loads]),
        "unload_ms": _spread([load.unloaded - load.used for load in loads]),
        "pause_ms": _spread(pauses),
        "stall_ms": _spread([pause - step for pause in pauses]),
    }


def _meet(earlier: float, later: float, load: Load) -> bool:
    """Whether a pause between two tokens and the load have a moment in common."""
    return later > load.began and earlier < load.loaded


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": 1e3 * statistics.median(seconds), "least": 1e3 * min(seconds), "most": 1e3 * max(seconds)}


def _rss(engine: ClientEngine) -> int:
    return sum(rank.rss_bytes for rank in engine.statistics().ranks)


def table(report: Report) -> str:
    rows: list[tuple[str, ...]] = [("ms", "median", "least", "most")]
    for name in ("load_ms", "first_token_ms", "unload_ms", "pause_ms", "stall_ms"):
        found = report[name]
        row = (
            name.removesuffix("_ms").replace("_", " "),
            *(f"{found[key]:.1f}" for key in ("median", "least", "most")),
        )
        rows.append(row)
    quiet = f"a step without loads: {report['step_ms']:.1f} ms, at most {report['longest_quiet_pause_ms']:.1f}"
    return f"{columns(rows)}\n{quiet}; memory of the ranks: {report['rss_growth_bytes'] / 2**20:+.1f} MiB"


ADAPTER_LOADS = Benchmark(
    "adapter-loads",
    "Measures how long loading a LoRA adapter takes, and what it does to requests that run.",
    AdapterLoadsConfig,
    prepare,
    measure,
    table,
)
