"""`allspan bench adapters`: the speed of requests with LoRA adapters against that of the model alone.

One cluster with the adapters of --lora-modules serves both: rounds of requests without and with adapters take turns,
each first in every second pair, and what is told is the ratio of a pair's two rounds. The requests of a round take the
adapters in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.engine.latency import Round, one_round
from allspan.client.bench.load import greedy, random_prompt
from allspan.client.bench.report import columns
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.options import RequestOptions


@dataclass(frozen=True)
class AdaptersConfig:
    """The settings of the adapters benchmark."""

    batch_size: int = 1
    """Sends this many requests at once."""
    input_len: int = 128
    """Sets the prompt tokens of each request; they are drawn at random."""
    output_len: int = 64
    """Sets the new tokens of each request."""
    distinct: int = 0
    """Gives the requests of a round so many of the adapters in turn; 0 takes all of them."""
    rounds: int = 10
    """Measures this many pairs of rounds."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        at_least(self, {"batch_size": 1, "input_len": 1, "output_len": 2, "distinct": 0, "rounds": 1})


def prepare(config: AdaptersConfig, options: Options) -> Options:
    """Returns the options with a context length that fits the requests. ConfigError without adapters."""
    if not options.get("lora_modules"):
        raise ConfigError("--lora-modules is missing: name the adapters, NAME=FOLDER for each")
    options = {"max_num_seqs": max(64, config.batch_size), "enable_prefix_caching": False, **options}
    return with_context(options, config.input_len + config.output_len, "--input-len + --output-len")


def measure(engine: ClientEngine, config: AdaptersConfig, options: Options) -> Report:
    names = [adapter.name for adapter in engine.cluster.adapters]
    if config.distinct > len(names):
        raise ConfigError(f"--distinct is {config.distinct}, must be at most the {len(names)} of --lora-modules")
    draw, params = random.Random(config.seed), greedy(config.output_len)

    def round_of(adapters: Sequence[str]) -> Round:
        prompts = [random_prompt(draw, engine, config.input_len) for _ in range(config.batch_size)]
        turns = itertools.islice(itertools.cycle(adapters), config.batch_size)
        return asyncio.run(one_round(engine, prompts, params, [RequestOptions(adapter=name) for name in turns]))

    kinds = {"model": ("",), "adapters": tuple(names[: config.distinct or len(names)])}
    rounds: dict[str, list[Round]] = {kind: [round_of(adapters)] for kind, adapters in kinds.items()}
    for number in range(config.rounds):
        order = list(kinds.items())
        for kind, adapters in order if number % 2 else reversed(order):
            rounds[kind].append(round_of(adapters))
    return compared(config, *(found[1:] for found in rounds.values()))  # without those that warmed up


def compared(config: AdaptersConfig, model: Sequence[Round], adapters: Sequence[Round]) -> Report:
    """The medians of both kinds of rounds, and of the ratios of pairs: adapters' speed over the model's."""

    def speeds(rounds: Sequence[Round]) -> dict[str, list[float]]:
        return {
            "prefill_tokens_per_s": [config.batch_size * config.input_len / each.ttft_s for each in rounds],
            "decode_tokens_per_s": [each.decode_tokens / each.decode_s for each in rounds],
        }

    report: Report = {}
    for name, own in speeds(model).items():
        other = speeds(adapters)[name]
        pairs = [with_one / without for without, with_one in zip(own, other, strict=True)]
        report[name] = {
            "model": statistics.median(own),
            "adapters": statistics.median(other),
            "ratio": statistics.median(pairs),
            "ratio_spread": [min(pairs), max(pairs)],
        }
    return report


def table(report: Report) -> str:
    def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
        least, most = found["ratio_spread"]
        ratio = f"{found['ratio']:.3f} ({least:.3f} to {most:.3f})"
        return name, f"{found['model']:.1f}", f"{found['adapters']:.1f}", ratio

    heads = ("tokens/s", "model", "with adapters", "ratio (least to most)")
    kinds = {"prefill": report["prefill_tokens_per_s"], "decode": report["decode_tokens_per_s"]}
    return columns([heads, *(row(name, found) for name, found in kinds.items())])


ADAPTERS = Benchmark(
    "adapters",
    "Measures prefill and decode with LoRA adapters against the model alone.",
    AdaptersConfig,
    prepare,
    measure,
    table,
)
