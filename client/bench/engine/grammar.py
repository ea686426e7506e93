"""`allspan bench grammar`: what it costs to keep outputs in a grammar: the masks' times, and tokens per second beside
the same requests without one, alternating."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import random_prompt, spread
from allspan.client.bench.report import columns
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.grammar import KINDS, Grammar
from allspan.protos.api.sampling import SamplingParams

PEOPLE = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
            "role": {"enum": ["admin", "editor", "reader"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string", "maxLength": 40}, "zip": {"type": "integer"}},
                "required": ["street", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "email", "role", "tags", "address"],
        "additionalProperties": False,
    },
}
"""A JSON schema whose outputs are longer than any output length here, so that none ends early."""


@dataclass(frozen=True)
class GrammarConfig:
    """The settings of the grammar benchmark."""

    batch_size: int = 16
    """Decodes this many requests at once."""
    input_len: int = 16
    """Sets the prompt tokens of each request; they are drawn at random."""
    output_len: int = 96
    """Sets the new tokens of each request."""
    repeats: int = 5
    """Makes this many runs with the grammar, and as many without, in turns."""
    temperature: float = 0.8
    """Sets the temperature of all runs."""
    kind: str = "json_schema"
    """Sets the kind of the grammar: json_object, json_schema, regex, choice or grammar."""
    text: str = ""
    """Sets the grammar; empty takes a schema of a hundred people. A grammar whose texts end early is not compared
    fairly."""
    seed: int = 0
    """Seeds the generator of the prompts and draws."""

    def __post_init__(self) -> None:
        at_least(self, {"batch_size": 1, "input_len": 1, "output_len": 2, "repeats": 1, "temperature": 0})
        if self.kind not in KINDS:
            raise ConfigError(f"--kind is {self.kind!r}, must be one of {', '.join(KINDS)}")

    @property
    def grammar(self) -> Grammar:
        """Raises InvalidRequest."""
        is_ours = self.kind == "json_schema" and not self.text
        return Grammar(self.kind, json.dumps(PEOPLE) if is_ours else self.text)


def prepare(config: GrammarConfig, options: Options) -> Options:
    options = {"max_num_seqs": max(config.batch_size, 16), **options}
    return with_context(options, config.input_len + config.output_len, "--input-len + --output-len")


def measure(engine: ClientEngine, config: GrammarConfig, options: Options) -> Report:
    draw = random.Random(config.seed)
    rates: dict[str, list[float]] = {"plain": [], "grammar": []}
    ratios: list[float] = []
    for repeat in range(-1, config.repeats):  # the first warms up
        prompts = [random_prompt(draw, engine, config.input_len) for _ in range(config.batch_size)]
        pair = {name: _tokens_per_s(engine, config, prompts, name) for name in rates}
        if repeat >= 0:
            ratios.append(pair["grammar"] / pair["plain"])
            for name, rate in pair.items():
                rates[name].append(rate)
    return {
        "tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "ratio": spread(ratios),
        "masks": asyncio.run(engine.ainspect("masks")),
    }


def _tokens_per_s(engine: ClientEngine, config: GrammarConfig, prompts: Sequence[list[int]], name: str) -> float:
    params = [
        SamplingParams(
            max_tokens=config.output_len,
            temperature=config.temperature,
            ignore_eos=True,
            seed=config.seed + i,
            grammar=config.grammar if name == "grammar" else None,
        )
        for i in range(len(prompts))
    ]
    started = time.perf_counter()
    done = engine.generate(prompts, params)
    return sum(len(completion.token_ids) for completion in done) / (time.perf_counter() - started)


def table(report: Report) -> str:
    rows: list[Sequence[str]] = [("", "median", "min", "max")]
    for name, values in report["tokens_per_s"].items():
        rows.append((f"{name}, tokens/s", *(f"{values[key]:.1f}" for key in ("median", "min", "max"))))
    rows.append(("ratio", *(f"{report['ratio'][key]:.3f}" for key in ("median", "min", "max"))))
    masks = report["masks"]
    times = ", ".join(f"{name} {1e6 * masks[f'{name}_s']:.0f} µs" for name in ("median", "p90", "p99", "most")).replace(
        "most", "max"
    )
    waited = 1e6 * masks["waited_s"] / max(masks["masks"], 1)
    of_masks = (
        f"time per mask on rank 0 ({masks['masks']:.0f} masks): {times}; the sampler waited {waited:.0f} µs for each"
    )
    return f"{columns(rows)}\n{of_masks}"


GRAMMAR = Benchmark(
    "grammar",
    "Measures the cost of structured output: tokens per second with a grammar and without.",
    GrammarConfig,
    prepare,
    measure,
    table,
)
