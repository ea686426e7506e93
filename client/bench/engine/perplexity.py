"""`allspan bench perplexity`: how well a model foretells a text, through the prompt's own log-probabilities.

The text is tokenised once, as a whole, and cut into windows without overlap. Within a window every token but the first
is foretold from those before it. Perplexity is exp of the mean of -log p over all of these.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.report import facts
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError, InternalError
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.progress import Progress


@dataclass(frozen=True)
class PerplexityConfig:
    """The text of the perplexity benchmark, and its windows."""

    text: str
    """Names the file of UTF-8 text to read."""
    window: int = 1024
    """Sets the tokens of a window."""
    windows: int = 0
    """Reads only this many windows from the beginning; 0 reads all that are full."""
    bos: bool = False
    """Puts what the model wants before a prompt (its begin-of-sequence token) before every window."""
    concurrency: int = 4
    """Sends this many windows at once."""

    def __post_init__(self) -> None:
        at_least(self, {"window": 2, "windows": 0, "concurrency": 1})


def prepare(config: PerplexityConfig, options: Options) -> Options:
    if not Path(config.text).is_file():
        raise ConfigError(f"--text {config.text}: no such file")
    if "max_num_seqs" not in options:
        options = {**options, "max_num_seqs": config.concurrency}
    return with_context(options, config.window + 1 + int(config.bos), "--window and a token to end with")


def measure(engine: ClientEngine, config: PerplexityConfig, options: Options) -> Report:
    windows = cut(engine, config)
    started = time.perf_counter()
    scores = asyncio.run(_score(engine, windows, config.concurrency))
    seconds = time.perf_counter() - started
    return summary(scores) | {"seconds": seconds, "tokens_per_s": sum(map(len, windows)) / seconds}


def cut(engine: ClientEngine, config: PerplexityConfig) -> list[list[int]]:
    """Returns the token ids of each window. ConfigError for a text that does not fill one."""
    try:
        text = Path(config.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {config.text}: {error}") from None
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    count = len(ids) // config.window
    if count < max(config.windows, 1):
        raise ConfigError(
            f"--text {config.text} has {len(ids)} tokens, must fill {max(config.windows, 1)} windows of {config.window}"
        )
    prefix = list(tokenizer.prefix) if config.bos else []
    return [
        prefix + ids[i * config.window : (i + 1) * config.window] for i in range(min(config.windows, count) or count)
    ]


def summary(scores: Sequence[Sequence[float]]) -> Report:
    """Returns the perplexity from each window's log-probabilities. The standard error takes the tokens for
    independent."""
    every = [-score for window in scores for score in window]
    mean = statistics.fmean(every)
    perplexity = math.exp(mean)
    return {
        "perplexity": perplexity,
        "standard_error": perplexity * statistics.pstdev(every) / math.sqrt(len(every)),
        "nll_per_token": mean,
        "tokens": len(every),
        "windows": len(scores),
        "window_perplexities": [math.exp(-statistics.fmean(window)) for window in scores],
    }


async def _score(engine: ClientEngine, windows: Sequence[list[int]], concurrency: int) -> list[list[float]]:
    slots = asyncio.Semaphore(concurrency)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    finished = itertools.count(1)

    async def score(window: list[int]) -> list[float]:
        async with slots:
            (completion,) = await engine.agenerate(window, params)
        scores = [entry.logprob for entry in completion.prompt_logprobs]
        if len(scores) != len(window) - 1:
            raise InternalError(f"{len(scores)} log-probabilities came for a prompt of {len(window)} tokens")
        progress(next(finished))
        return scores

    with Progress("bench perplexity", len(windows), "windows") as progress:
        return await asyncio.gather(*map(score, windows))


def table(report: Report) -> str:
    return facts(
        [
            ("perplexity", f"{report['perplexity']:.4f} ± {report['standard_error']:.4f}"),
            ("per token", f"{report['nll_per_token']:.6f} nats"),
            ("scored text", f"{report['tokens']:,} tokens in {report['windows']} windows"),
            ("speed", f"{report['tokens_per_s']:,.0f} tokens/s"),
        ]
    )


PERPLEXITY = Benchmark(
    "perplexity",
    "Measures the perplexity of a text: how well the model predicts it.",
    PerplexityConfig,
    prepare,
    measure,
    table,
)
