"""`allspan bench streaming`: what each hop between the engine and a reader of its tokens costs.

One run, one machine, the same prompts for all: `generate` of an `Engine` in its own process; `generate` of a facade of
a cluster of one rank with as many threads; and streams of that cluster's gateway through gRPC Generate, completions and
chat/completions. The sides take turns within a round, another one first each time, and while one is at work the others
sleep. Whoever asks runs on the same processors, in a process of its own, and its processor time is told apart, as are
the gateway's and the ranks'. A ratio is a median over the engine's; its spread is that of the rounds' own ratios. The
gap is the time from one chunk to the next as the reader sees it, beside the time of a step of the engine in process.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.engine.compare_peers import Peer
from allspan.client.bench.load import spread
from allspan.client.bench.machine import machine, versions
from allspan.client.bench.report import columns
from allspan.client.bench.serving.server import ServerAddresses, ServerProcess, cpu_s
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.text import load_tokenizer

SCRIPT = Path(__file__).with_name("streaming_script.py")
START_TIMEOUT_S = 600.0
WORDS = ("river", "stone", "seven", "green", "quiet", "under", "letter", "window", "morning", "paper", "iron", "salt")
NAMES = {
    "engine": "Engine.generate, in process",
    "facade": "ClientEngine.generate",
    "grpc": "gRPC Generate",
    "completions": "HTTP completions, SSE",
    "chat": "HTTP chat/completions, SSE",
}


@dataclass(frozen=True)
class StreamingConfig:
    """The settings of the streaming benchmark."""

    streams: tuple[int, ...] = (32,)
    """Sends this many requests at once. Each of several numbers is measured by itself."""
    input_words: int = 8
    """Sends prompts of this many words, drawn at random; the chat template adds to them."""
    output_len: int = 96
    """Asks for this many new tokens a request."""
    repeats: int = 7
    """Measures this many rounds, and reports medians."""
    warmup: int = 1
    """Plays this many rounds before those that count."""
    sides: tuple[str, ...] = tuple(NAMES)
    """Measures these of engine, facade, grpc, completions and chat. The engine always takes part: all are compared with
    it."""
    seed: int = 0
    """Draws the prompts by this seed."""
    peers_timeout: float = 600.0
    """Gives a side this many seconds to load, and for each of its turns."""

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1:
            raise ConfigError(
                f"--streams is {','.join(map(str, self.streams)) or 'empty'}, must be numbers of at least 1"
            )
        at_least(self, {"input_words": 1, "output_len": 2, "repeats": 1, "warmup": 0, "peers_timeout": 1})
        if unknown := [side for side in self.sides if side not in NAMES]:
            raise ConfigError(f"--sides has {unknown[0]!r}, known are {', '.join(NAMES)}")


@dataclass(frozen=True)
class Turn:
    """One side's part of a round, with the processor seconds of the client (for the engine's side: of all of it),
    gateway and ranks."""

    tokens: int
    messages: int
    seconds: float
    cpu_s: float
    gateway_cpu_s: float = 0.0
    ranks_cpu_s: float = 0.0
    gap_s: Mapping[str, float] | None = None
    """p50, p90 and max of the times between two chunks of a stream; None where nothing is streamed."""
    step_s: float = 0.0
    """Time of a decoding step; 0 where it is not known."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def prepare(config: StreamingConfig, options: Options) -> Options:
    if not options.get("threads"):
        options = {**options, "threads": len(os.sched_getaffinity(0))}
    if options.setdefault("ranks", 1) != 1:
        raise ConfigError(f"--ranks is {options['ranks']}, must be 1: the engine in process is one rank")
    options = {"max_num_seqs": max(config.streams), "enable_prefix_caching": False, **options}
    needed = 256 + 4 * config.input_words + config.output_len
    return with_context(options, needed, "256 + 4 x --input-words + --output-len")


class _Run:
    """The sides' processes, and the server."""

    def __init__(self, model: str, config: StreamingConfig, options: Options, quiet: bool) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(model)
        self._peers: dict[str, Peer] = {}
        self._server = ServerProcess(model, options, quiet)
        try:
            addresses = self._server.wait_ready(START_TIMEOUT_S)
            with ClientEngine(attach=addresses.run_dir) as engine:
                facts = engine.statistics()
                self.versions = versions(facts)
                self._ranks = [rank.pid for rank in facts.ranks]
                served = engine.model
            for side in dict.fromkeys(("engine", *config.sides)):
                self._peers[side] = Peer(sys.executable, SCRIPT, pauses=side == "engine")
                self._peers[side].ask(_load(side, model, served, addresses, options), config.peers_timeout)
        except BaseException:
            self.close()
            raise

    def rounds(self, streams: int) -> dict[str, list[Turn]]:
        """Runs every side's turns with this many requests at once."""
        config = self._config
        draw = random.Random(config.seed)
        turns: dict[str, list[Turn]] = {side: [] for side in self._peers}
        names = list(self._peers)
        for number in range(-config.warmup, config.repeats):
            texts = [" ".join(draw.choices(WORDS, k=config.input_words)) for _ in range(streams)]
            prompts = [self._tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
            first = number % len(names)
            for side in names[first:] + names[:first]:
                turn = self._turn(side, prompts, texts)
                if number >= 0:
                    turns[side].append(turn)
        return turns

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._server.close()

    def _turn(self, side: str, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> Turn:
        request = {"do": "round", "prompts": prompts, "texts": texts, "output_len": self._config.output_len}
        before = self._cpu()
        answer = self._peers[side].ask(request, self._config.peers_timeout)
        spent = [after - earlier for after, earlier in zip(self._cpu(), before, strict=True)]
        gateway, ranks = (0.0, 0.0) if side == "engine" else spent
        return Turn(**answer, gateway_cpu_s=gateway, ranks_cpu_s=ranks)

    def _cpu(self) -> tuple[float, float]:
        return cpu_s(self._server.pid), sum(map(cpu_s, self._ranks))


def _load(side: str, model: str, served: str, addresses: ServerAddresses, options: Options) -> dict[str, Any]:
    settings = {key: options[key] for key in options if key not in ("ranks", "served_model_name", "no_restart")}
    address = {"facade": str(addresses.run_dir), "grpc": addresses.grpc}.get(side, addresses.http)
    about = {"model": model, "settings": settings} if side == "engine" else {"model": served, "address": address}
    return {"do": "load", "side": side, **about}


def summary(turns: Mapping[str, Sequence[Turn]]) -> Report:
    """Returns for each side: tokens per second, the ratio to the engine's, messages a token, gaps, processor time of
    1000 tokens."""
    ours = turns["engine"]
    report: Report = {}
    for side, found in turns.items():
        rates = [turn.rate for turn in found]
        pairs = [rate / base.rate for rate, base in zip(rates, ours, strict=True)]
        tokens = sum(turn.tokens for turn in found)
        report[side] = {
            "tokens_per_s": spread(rates),
            "samples": rates,
            "ratio": statistics.median(rates) / statistics.median(turn.rate for turn in ours),
            "ratio_by_round": spread(pairs),
            "messages_per_token": sum(turn.messages for turn in found) / tokens,
            "gap_s": _gap(found),
            "step_s": statistics.median(turn.step_s for turn in found),
            "cpu_s_per_1000_tokens": {
                who: 1000 * sum(getattr(turn, field) for turn in found) / tokens
                for who, field in (("asking", "cpu_s"), ("gateway", "gateway_cpu_s"), ("ranks", "ranks_cpu_s"))
            },
        }
    return report


def _gap(turns: Sequence[Turn]) -> dict[str, float] | None:
    """Medians of the rounds' p50 and p90, and the longest gap of all; None for a side that does not stream."""
    gaps = [turn.gap_s for turn in turns if turn.gap_s is not None]
    if not gaps:
        return None
    medians = {name: statistics.median(gap[name] for gap in gaps) for name in ("p50", "p90")}
    return {**medians, "max": max(gap["max"] for gap in gaps)}


def table(report: Report) -> str:
    """A part for each number of streams."""
    return "\n\n".join(_part(part["streams"], part["sides"]) for part in report["streams"]) + (
        "\nCPU: processor seconds per 1,000 tokens; those of the engine in process are in the column of the client"
    )


def _part(streams: int, sides: Report) -> str:
    heading = f"{counted(streams, 'stream')}|tokens/s|min|max|ratio to engine|ratio by round|messages/token|"
    heading += "gap p50 ms|gap p90 ms|gap max ms|client CPU|gateway CPU|ranks CPU"
    rows = [tuple(heading.split("|"))]
    for side, found in sides.items():
        rate, pairs, cpu = found["tokens_per_s"], found["ratio_by_round"], found["cpu_s_per_1000_tokens"]
        ratio = (f"{found['ratio']:.3f} x", f"{pairs['median']:.3f} ({pairs['min']:.3f} to {pairs['max']:.3f})")
        rates = (f"{rate[part]:,.1f}" for part in ("median", "min", "max"))
        gap = found["gap_s"]
        gaps = [f"{1000 * gap[part]:.1f}" for part in ("p50", "p90", "max")] if gap is not None else ["", "", ""]
        spent = (f"{cpu[who]:.3f}" for who in ("asking", "gateway", "ranks"))
        rows.append((NAMES[side], *rates, *ratio, f"{found['messages_per_token']:.2f}", *gaps, *spent))
    step_s = sides["engine"]["step_s"]
    return columns(rows) + f"\nstep time of the engine in process: {1000 * step_s:.1f} ms"


class StreamingBenchmark(Benchmark):
    """The benchmark that compares streaming through a gateway with an engine in the client's process."""

    def run(self, model: str, config: Any, quiet: bool = False, **serve_options: Any) -> Report:
        given = {key: value for key, value in serve_options.items() if value is not None}
        options = self.prepare(config, given)
        run = _Run(model, config, options, quiet)
        try:
            report: Report = {
                "streams": [{"streams": count, "sides": summary(run.rounds(count))} for count in config.streams]
            }
        finally:
            run.close()
        settings = {"model": model, **asdict(config), **options}
        return report | {"settings": settings, "versions": run.versions, "machine": machine()}


def _measured_by_itself(engine: ClientEngine, config: Any, options: Options) -> Report:
    raise AssertionError("StreamingBenchmark.run measures by itself")


STREAMING = StreamingBenchmark(
    "streaming",
    "Measures the cost of the client, of gRPC and of event streams next to the engine in process, and the gaps between "
    "tokens.",
    StreamingConfig,
    prepare,
    _measured_by_itself,
    table,
)
