"""`allspan bench adapters`: the speed of requests with LoRA adapters against that of the model alone.

One cluster with the adapters of --lora-modules serves both: rounds of requests without adapters and with take turns, in
the reverse order every second time, and what is told is the ratio of two rounds of one turn. The requests of a round
take the adapters in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.engine.latency import Round, batch_sizes, one_round
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
    batches: tuple[str, ...] = ()
    """Measures these batches instead, one after the other, each written as REQUESTSxINPUTxOUTPUT, such as
    1x1024x257,64x1024x256."""
    distinct: tuple[str, ...] = ()
    """Gives the requests of a round so many of the adapters in turn, such as 1,32 for rounds with one and rounds
    with 32 of them; without it all of them."""
    rounds: int = 10
    """Measures each kind of round this many times, in turn."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        at_least(self, {"batch_size": 1, "input_len": 1, "output_len": 2, "rounds": 1})
        for batch in self.each if self.batches else ():
            if batch.output_len < 2:
                raise ConfigError(f"--batches has output_len {batch.output_len}, must be at least 2")
        for number in self.distinct:
            if not (number.isdecimal() and 0 < int(number) < 1 << 16):
                raise ConfigError(f"--distinct has {number!r}, must be numbers of adapters, such as 1,32")

    @property
    def each(self) -> tuple[AdaptersConfig, ...]:
        """The settings of each batch."""
        sizes: list[dict[str, Any]] = [dict(each) for each in batch_sizes(self.batches)]
        return tuple(replace(self, batches=(), **each) for each in sizes) or (self,)


def prepare(config: AdaptersConfig, options: Options) -> Options:
    """Returns the options with a context length that fits the requests. ConfigError without adapters."""
    if not options.get("lora_modules"):
        raise ConfigError("--lora-modules is missing: name the adapters, NAME=FOLDER for each")
    most = max(batch.batch_size for batch in config.each)
    options = {"max_num_seqs": max(64, most), "enable_prefix_caching": False, **options}
    needed = max(batch.input_len + batch.output_len for batch in config.each)
    return with_context(options, needed, "--input-len + --output-len")


def measure(engine: ClientEngine, config: AdaptersConfig, options: Options) -> Report:
    names = [adapter.name for adapter in engine.cluster.adapters]
    counts = tuple(map(int, config.distinct)) or (len(names),)
    if max(counts) > len(names):
        raise ConfigError(f"--distinct has {max(counts)}, must be at most the {len(names)} of --lora-modules")
    cases: list[Report] = []
    for batch in config.each:
        rounds = _rounds(engine, batch, {0: ("",)} | {count: names[:count] for count in counts})
        model = rounds.pop(0)
        cases += [_sizes(batch, count) | compared(batch, model, found) for count, found in rounds.items()]
    return {"cases": cases}


def _rounds(engine: ClientEngine, config: AdaptersConfig, kinds: dict[int, Sequence[str]]) -> dict[int, list[Round]]:
    """The measured rounds of each kind, whose requests take these adapters in turn."""
    draw, params = random.Random(config.seed), greedy(config.output_len)

    def round_of(adapters: Sequence[str]) -> Round:
        prompts = [random_prompt(draw, engine, config.input_len) for _ in range(config.batch_size)]
        turns = itertools.islice(itertools.cycle(adapters), config.batch_size)
        return asyncio.run(one_round(engine, prompts, params, [RequestOptions(adapter=name) for name in turns]))

    rounds: dict[int, list[Round]] = {kind: [] for kind in kinds}
    for adapters in kinds.values():
        round_of(adapters)  # warms up
    for number in range(config.rounds):
        order = list(kinds.items())
        for kind, adapters in order if number % 2 else reversed(order):
            rounds[kind].append(round_of(adapters))
    return rounds


def _sizes(config: AdaptersConfig, distinct: int) -> Report:
    sizes = {name: getattr(config, name) for name in ("batch_size", "input_len", "output_len")}
    return {**sizes, "distinct": distinct}


def compared(config: AdaptersConfig, model: Sequence[Round], adapters: Sequence[Round]) -> Report:
    """The medians of both kinds of rounds, and of the ratios of pairs: adapters' speed over the model's. Output is all
    new tokens over the whole time of a round."""

    def speeds(rounds: Sequence[Round]) -> dict[str, list[float]]:
        prompts, outputs = config.batch_size * config.input_len, config.batch_size * config.output_len
        return {
            "prefill_tokens_per_s": [prompts / each.ttft_s for each in rounds],
            "decode_tokens_per_s": [each.decode_tokens / each.decode_s if each.decode_s else 0.0 for each in rounds],
            "output_tokens_per_s": [outputs / each.total_s for each in rounds],
        }

    report: Report = {}
    for name, own in speeds(model).items():
        other = speeds(adapters)[name]
        pairs = [with_one / without if without else 0.0 for without, with_one in zip(own, other, strict=True)]
        report[name] = {
            "model": statistics.median(own),
            "adapters": statistics.median(other),
            "ratio": statistics.median(pairs),
            "ratio_spread": [min(pairs), max(pairs)],
        }
    return report


def table(report: Report) -> str:
    def row(case: Report, kind: str) -> tuple[str, ...]:
        found: dict[str, Any] = case[f"{kind}_tokens_per_s"]
        least, most = found["ratio_spread"]
        batch = "x".join(str(case[name]) for name in ("batch_size", "input_len", "output_len"))
        ratio = f"{found['ratio']:.3f} ({least:.3f} to {most:.3f})"
        return batch, str(case["distinct"]), kind, f"{found['model']:.1f}", f"{found['adapters']:.1f}", ratio

    heads = ("batch", "adapters", "tokens/s", "model", "with adapters", "ratio (least to most)")
    kinds = ("prefill", "decode", "output")
    return columns([heads, *(row(case, kind) for case in report["cases"] for kind in kinds)])


ADAPTERS = Benchmark(
    "adapters",
    "Measures prefill and decode with LoRA adapters against the model alone.",
    AdaptersConfig,
    prepare,
    measure,
    table,
)
