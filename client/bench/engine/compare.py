"""`allspan bench compare`: this project and other engines in one run, in turn, on the same machine, model and prompts.

Each round every engine gets the same random token ids: one prompt alone, whose reading is prefill and whose further
tokens are decode; then a batch of prompts, for decode of many at once. The engines take turns within a round, another
one first each time, and whoever is not at work is stopped (the others) or sleeps (this project). Rates are medians over
the rounds. A ratio is our median over theirs; its spread is that of the rounds' own ratios.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.engine.compare_peers import Peer, find_engines, model_files
from allspan.client.bench.engine.latency import Round, one_round
from allspan.client.bench.load import greedy, random_prompt
from allspan.client.bench.plot import check_plot, plot_compare
from allspan.client.bench.report import columns
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import AllspanError, ConfigError

OURS = "allspan"
ONE_AT_A_TIME = {"openvino": "its pipeline takes one sequence of token ids at a time"}
"""The engines that are measured without batches, and why."""

Prompts = list[list[int]]
Play = Callable[[Prompts, int], Round]
"""(prompts, new tokens of each) → what it took. Raises AllspanError."""


@dataclass(frozen=True)
class CompareConfig:
    """The engines of the comparison, the measures, and the number of rounds."""

    peers_python: tuple[str, ...] = ()
    """Names Python interpreters whose environments have llama-cpp-python or openvino-genai; every engine found takes
    part."""
    peers_model: tuple[str, ...] = ()
    """Names a GGUF file of the same model for the other engines, or ENGINE=FILE for one of them; empty gives them MODEL
    itself."""
    input_len: int = 512
    """Sets the prompt tokens, drawn at random: what prefill reads, and the context of decode."""
    output_len: int = 64
    """Sets the new tokens after the prompt."""
    batch_size: int = 32
    """Sends this many requests at once to measure the decode of a batch; 0 leaves this part out."""
    batch_input_len: int = 128
    """Sets the prompt tokens of each request of the batch."""
    batch_output_len: int = 48
    """Sets the new tokens of each request of the batch."""
    repeats: int = 7
    """Makes this many rounds, in which the engines take turns, and reports medians."""
    warmup: int = 1
    """Makes this many rounds first that are not counted."""
    seed: int = 0
    """Seeds the generator of the random prompts."""
    peers_timeout: float = 600.0
    """Sets the seconds that another engine gets to load the model, and for each of its turns."""
    plot: str = ""
    """Draws the rates into this file (PNG, SVG or PDF); it needs matplotlib."""

    def __post_init__(self) -> None:
        least = {"input_len": 1, "output_len": 2, "batch_size": 0, "batch_input_len": 1, "batch_output_len": 2}
        at_least(self, {**least, "repeats": 1, "warmup": 0, "peers_timeout": 1})


@dataclass
class Contender:
    """One engine of the comparison. `error` is what ended its part; its samples do not count then."""

    play: Play | None
    about: Report
    error: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second of each round, by measure."""


def prepare(config: CompareConfig, options: Options) -> Options:
    check_plot(config.plot)
    if config.peers_python:
        if not options.get("threads"):
            raise ConfigError("--peers-python needs --threads: the other engines get as many as all ranks together")
        if options.get("load_format") == "dummy" and not config.peers_model:
            raise ConfigError("--random-weights has no file for --peers-python: give --peers-model, or measure alone")
        find_engines(config.peers_python)  # what is wrong with them is told before a model is loaded
    batch_len = config.batch_input_len + config.batch_output_len if config.batch_size else 0
    options = {"ranks": 1, "max_num_seqs": max(config.batch_size, 1), **options}
    return with_context(
        options, max(config.input_len + config.output_len, batch_len), "the longest prompt and its output"
    )


def measure(engine: ClientEngine, config: CompareConfig, options: Options) -> Report:
    ours = Contender(_ours(engine), {"model": engine.cluster.model_path, "threads": _threads(options)})
    peers: list[Peer] = []
    contenders = {OURS: ours}
    try:
        found = find_engines(config.peers_python)
        files = model_files(config.peers_model, tuple(found), engine.cluster.model_path)
        for name, python in found.items():
            peers.append(Peer(python))
            contenders[name] = _load(peers[-1], name, files[name], config, options)
        play(engine, config, contenders)
    finally:
        for peer in peers:
            peer.close()
    report = summary(contenders, config.batch_size)
    if config.plot:
        plot_compare(config.plot, report, f"{engine.cluster.model}, {_threads(options)} threads")
    return report


def _threads(options: Options) -> int:
    """Returns the threads of all ranks together; 0 leaves the number to the launcher."""
    return (options.get("threads") or 0) * (options.get("ranks") or 1)


def _ours(engine: ClientEngine) -> Play:
    return lambda prompts, output_len: asyncio.run(one_round(engine, prompts, greedy(output_len)))


def _load(peer: Peer, name: str, model: str, config: CompareConfig, options: Options) -> Contender:
    request: dict[str, Any] = {"do": "load", "engine": name, "model": model, "threads": _threads(options)}
    sizes = {"sequences": max(config.batch_size, 1), "max_tokens": options["max_model_len"]}
    about: Report = {"model": model, "threads": request["threads"]}
    try:
        about |= peer.ask(request | sizes, config.peers_timeout)
    except AllspanError as error:
        return Contender(None, about, str(error))

    def play(prompts: Prompts, output_len: int) -> Round:
        answer = peer.ask({"do": "round", "prompts": prompts, "output_len": output_len}, config.peers_timeout)
        total_s = answer["ttft_s"] + answer["decode_s"]
        return Round(answer["ttft_s"], answer["decode_s"], answer["decode_tokens"], total_s)

    return Contender(play, about)


def play(engine: ClientEngine, config: CompareConfig, contenders: Mapping[str, Contender]) -> None:
    """Runs all rounds and appends the results to the contenders' samples. An error of the others' ends their part; one
    of ours is raised."""
    draw = random.Random(config.seed)
    names = list(contenders)
    for number in range(-config.warmup, config.repeats):
        single = [random_prompt(draw, engine, config.input_len)]
        batch = [random_prompt(draw, engine, config.batch_input_len) for _ in range(config.batch_size)]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            contender = contenders[name]
            if contender.play is None:
                continue
            try:
                rates = _turn(contender.play, config, single, [] if name in ONE_AT_A_TIME else batch)
            except AllspanError as error:
                if name == OURS:
                    raise
                contender.play, contender.error = None, str(error)
                continue
            if number >= 0:
                for key, rate in rates.items():
                    contender.samples.setdefault(key, []).append(rate)


def _turn(play: Play, config: CompareConfig, single: Prompts, batch: Prompts) -> dict[str, float]:
    """Returns the tokens per second of one engine's turn."""
    alone = play(single, config.output_len)
    rates = {"decode": alone.decode_tokens / alone.decode_s, "prefill": config.input_len / alone.ttft_s}
    if batch:
        together = play(batch, config.batch_output_len)
        # Prompts too many for one step: the first ones may be done when the last one begins.
        rates["batch decode"] = together.decode_tokens / together.decode_s if together.decode_tokens else 0.0
    return rates


def summary(contenders: Mapping[str, Contender], batch_size: int) -> Report:
    """Returns rates by measure and engine, ratios of ours to theirs, and the engines that were left out, with the
    reason."""
    ours = contenders[OURS].samples
    rates: Report = {key: {} for key in ours}
    ratios: Report = {key: {} for key in ours}
    left_out: Report = {}
    for name, contender in contenders.items():
        if contender.error:
            left_out[name] = contender.error
            continue
        if batch_size and name in ONE_AT_A_TIME:
            left_out[f"{name}, batch decode"] = ONE_AT_A_TIME[name]
        for key, samples in contender.samples.items():
            rates[key][name] = _quartiles(samples) | {"samples": samples}
            if name != OURS:
                pairs = [mine / other for mine, other in zip(ours[key], samples, strict=True)]
                median = statistics.median(ours[key]) / statistics.median(samples)
                ratios[key][name] = _quartiles(pairs) | {"median": median}
    engines = {name: contender.about for name, contender in contenders.items()}
    return {"engines": engines, "tokens_per_s": rates, "ratios": ratios, "left_out": left_out, "batch_size": batch_size}


def _quartiles(values: list[float]) -> Report:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "min": min(values), "max": max(values), "quartiles": [low, high]}


def table(report: Report) -> str:
    rows = [("tokens/s", "engine", "median", "min", "max", f"ratio of {OURS} to it", "range over the rounds")]
    for key, engines in report["tokens_per_s"].items():
        words = f"{key} ({report['batch_size']})" if key == "batch decode" else key
        for name, rate in engines.items():
            ratio = report["ratios"][key].get(name)
            over = (f"{ratio['median']:.2f} x", f"{ratio['min']:.2f} to {ratio['max']:.2f}") if ratio else ("", "")
            rows.append((words, name, *(f"{rate[part]:,.1f}" for part in ("median", "min", "max")), *over))
    notes = [f"{who} was left out: {why}" for who, why in report["left_out"].items()]
    return "\n".join([columns(rows), *notes])


COMPARE = Benchmark(
    "compare",
    "Compares the speed of this project with that of llama.cpp and OpenVINO GenAI.",
    CompareConfig,
    prepare,
    measure,
    table,
)
