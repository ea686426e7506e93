"""`allspan bench serve`: a server under a load of many callers, as they see it.

Requests leave at their moments (a Poisson process, bursts, a trace), or as soon as one of `--max-concurrency` callers
is free. The names of options and results are those of `vllm bench serve`. TTFT is the time from sending to the first
message with a token, TPOT the time from there to the last one over the tokens after the first, ITL the time between two
messages with tokens (which may hold several: `--stream-interval`), E2EL from sending to the last. Goodput counts the
requests that keep every limit of `--goodput`.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least
from allspan.client.bench.load import percentile
from allspan.client.bench.machine import machine
from allspan.client.bench.plot import check_plot
from allspan.client.bench.report import facts
from allspan.client.bench.serving.serve_clients import BACKENDS, Record, connect
from allspan.client.bench.serving.serve_plot import plot_serve
from allspan.client.bench.serving.server import ServerProcess
from allspan.client.bench.serving.workload import Item, WorkloadConfig, workload
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.cluster.progress import Progress

START_TIMEOUT_S = 600.0
METRICS = ("ttft", "tpot", "itl", "e2el")
SAMPLES = 3
"""Number of failed requests whose messages are kept."""


@dataclass(frozen=True)
class ServeBenchConfig(WorkloadConfig):
    """The server under test, the load, and the latency goals."""

    base_url: str = ""
    """Measures the server that runs at http://HOST:PORT (with --backend grpc: HOST:PORT), with the key of the variable
    OPENAI_API_KEY; empty starts one for MODEL."""
    backend: Literal["openai-chat", "openai", "grpc"] = "openai-chat"
    """Sets the interface: openai-chat (POST /v1/chat/completions), openai (POST /v1/completions) or grpc."""
    max_concurrency: int = 0
    """Limits the requests that run at once; 0 sets no limit."""
    num_warmups: int = 1
    """Sends this many requests before the measurement, which are not counted."""
    ignore_eos: bool = True
    """Makes each output exactly as long as requested; allspan, vLLM and SGLang have this field."""
    goodput: tuple[str, ...] = ()
    """Sets the limits of ttft, tpot and e2el, in milliseconds, within which a request counts as good, as in
    "ttft:200,tpot:50"."""
    metric_percentiles: tuple[float, ...] = (50, 90, 99)
    """Sets the percentiles of each latency that are reported."""
    request_timeout: float = 600.0
    """Sets the seconds after which a request counts as failed."""
    plot: str = ""
    """Draws latencies and throughput into this file (PNG, SVG or PDF); it needs matplotlib."""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        at_least(self, {"max_concurrency": 0, "num_warmups": 0, "request_timeout": 0.1})
        if self.backend not in BACKENDS:
            raise ConfigError(f"--backend is {self.backend!r}, must be one of {', '.join(BACKENDS)}")
        if any(not 0 < percent <= 100 for percent in self.metric_percentiles):
            raise ConfigError(f"--metric-percentiles is {self.metric_percentiles}, must be above 0, at most 100")
        slos(self.goodput)


def slos(goodput: Sequence[str]) -> dict[str, float]:
    """Metric → most milliseconds. ConfigError."""
    found = {}
    for entry in goodput:
        name, _, limit = entry.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if name not in ("ttft", "tpot", "e2el") or not value > 0:
            raise ConfigError(f"--goodput has {entry!r}, must be ttft, tpot or e2el, a colon and milliseconds")
        found[name] = value
    return found


async def drive(config: ServeBenchConfig, base_url: str) -> tuple[str, list[Record], float, float]:
    """The model's name, what became of each request, the seconds it took and this process's processor seconds."""
    client = connect(config.backend, base_url, config.ignore_eos, config.request_timeout)
    try:
        model = await client.model()
        items = workload(config)
        for item in items[: config.num_warmups]:
            warm = await client.ask(item, model)
            if warm.error:
                raise ConfigError(f"the first request to {base_url} failed: {warm.error} {warm.words[:300]}")
        slots = asyncio.Semaphore(config.max_concurrency or len(items))
        cpu, started = time.process_time(), time.perf_counter()

        with Progress("bench serve", len(items), "requests") as progress:
            finished = itertools.count(1)

            async def one(item: Item) -> Record:
                async with slots:
                    record = await client.ask(item, model)
                progress(next(finished))
                return record

            tasks = []
            for item in items:
                if (wait := started + item.at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(one(item)))
            records = await asyncio.gather(*tasks)
        return model, records, time.perf_counter() - started, time.process_time() - cpu
    finally:
        await client.close()


def summary(config: ServeBenchConfig, records: Sequence[Record], seconds: float, cpu_s: float) -> Report:
    """vLLM's names; milliseconds and tokens per second. Requests that failed count nowhere but in `failed`."""
    good = [record for record in records if not record.error]
    values: dict[str, list[float]] = {
        "ttft": [record.ttft_s for record in good],
        "tpot": [record.tpot_s for record in good if record.output_tokens > 1],
        "itl": [gap for record in good for gap in record.itl_s],
        "e2el": [record.e2el_s for record in good],
    }
    total_in, total_out = (sum(getattr(record, name) for record in good) for name in ("prompt_tokens", "output_tokens"))
    failed = Counter(record.error for record in records if record.error)
    report: Report = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": dict(failed),
        "error_samples": [record.words[:300] for record in records if record.error][:SAMPLES],
        "total_input_tokens": total_in,
        "cached_input_tokens": sum(record.cached_tokens for record in good),
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": None,
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "max_concurrent_requests": _most_at_once(records),
        "client_cpu_share": cpu_s / seconds,
    }
    if limits := slos(config.goodput):
        kept = [
            record
            for record in good
            if all(1000 * getattr(record, f"{name}_s") <= limit for name, limit in limits.items())
        ]
        report["request_goodput"] = len(kept) / seconds
    for name, found in values.items():
        report[f"mean_{name}_ms"] = 1000 * statistics.fmean(found) if found else 0.0
        report[f"median_{name}_ms"] = 1000 * statistics.median(found) if found else 0.0
        report[f"std_{name}_ms"] = 1000 * statistics.pstdev(found) if found else 0.0
        for percent in config.metric_percentiles:
            report[f"p{percent:g}_{name}_ms"] = 1000 * percentile(found, percent)
    return report


def _most_at_once(records: Sequence[Record]) -> int:
    steps = [(record.started, 1) for record in records] + [(record.ended, -1) for record in records]
    most = running = 0
    for _, step in sorted(steps):
        running += step
        most = max(most, running)
    return most


def table(report: Report) -> str:
    failed = ", ".join(f"{count} x {kind}" for kind, count in report["errors"].items())
    goodput = report["request_goodput"]
    rows = [
        ("requests", f"{report['completed']} completed, {report['failed']} failed{f' ({failed})' if failed else ''}"),
        (
            "duration",
            f"{report['duration']:.2f} s, at most {counted(report['max_concurrent_requests'], 'request')} at once",
        ),
        (
            "tokens",
            f"{report['total_input_tokens']:,} input ({report['cached_input_tokens']:,} of them cached), "
            f"{report['total_output_tokens']:,} output",
        ),
        (
            "requests/s",
            f"{report['request_throughput']:.2f}" + ("" if goodput is None else f" ({goodput:.2f} within the goals)"),
        ),
        (
            "tokens/s",
            f"{report['output_throughput']:,.1f} output, {report['total_token_throughput']:,.1f} input and output",
        ),
    ]
    for name in METRICS:
        parts = [f"mean {report[f'mean_{name}_ms']:,.1f}"]
        parts += [
            f"{key.split('_')[0].upper()} {value:,.1f}"
            for key, value in report.items()
            if key.startswith("p") and key.endswith(f"_{name}_ms")
        ]
        rows.append((name.upper(), ", ".join(parts) + " ms"))
    rows.append(("load of this client", f"{100 * report['client_cpu_share']:.0f} % of one processor"))
    return facts(rows)


class ServeBenchmark(Benchmark):
    """The benchmark of a running server, or of one that it starts with a gateway."""

    cluster = "It starts a cluster with a gateway, or takes the running server that --base-url names."

    def run(self, model: str, config: Any, quiet: bool = False, **serve_options: Any) -> Report:
        check_plot(config.plot)
        workload(config)  # what is wrong with it is told before a model is loaded
        if config.base_url:
            return self._report(config, config.base_url, {})
        options = {key: value for key, value in serve_options.items() if value is not None}
        server = ServerProcess(model, options, quiet)
        try:
            addresses = server.wait_ready(START_TIMEOUT_S)
            return self._report(config, addresses.grpc if config.backend == "grpc" else addresses.http, options)
        finally:
            server.close()

    def _report(self, config: ServeBenchConfig, base_url: str, options: Options) -> Report:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            model, records, seconds, cpu_s = runner.run(drive(config, base_url))
        report = summary(config, records, seconds, cpu_s)
        if config.plot:
            plot_serve(config.plot, records, f"{model}, {config.backend}, {config.dataset_name}")
        settings = {key: None if value == math.inf else value for key, value in asdict(config).items()}
        about = {"backend": config.backend, "model_id": model, "base_url": base_url}
        return {**about, **report, "settings": settings | options, "machine": machine()}


def _new_loop() -> asyncio.AbstractEventLoop:
    """Returns uvloop's event loop where it is installed, so that the client costs as little as possible."""
    try:
        return importlib.import_module("uvloop").new_event_loop()  # type: ignore[no-any-return]
    except ImportError:
        return asyncio.new_event_loop()


def _by_itself(engine: ClientEngine, config: Any, options: Options) -> Report:
    raise AssertionError("ServeBenchmark.run measures by itself")


SERVE = ServeBenchmark(
    "serve",
    "Measures the latencies and the throughput of a server under load, as its callers see them.",
    ServeBenchConfig,
    lambda config, options: options,
    _by_itself,
    table,
)
