"""The requests of `allspan bench serve` and their times: random prompts, conversations from a file, or a recorded
trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allspan.client.bench.benchmark import at_least
from allspan.client.bench.serving.trace_file import read_trace
from allspan.protos.api.errors import ConfigError

DATASETS = ("random", "prefix_repetition", "sharegpt", "trace")
BLOCK_TOKENS = 512
"""Tokens of one of a trace's `hash_ids`."""
FIRST_ID, LAST_ID = 32, 255
"""Token ids of made-up prompts: every vocabulary has them."""
CHARS_PER_TOKEN = 4

Prompt = list[int] | str


@dataclass(frozen=True)
class WorkloadConfig:
    """Flags of `vllm bench serve`, by their names."""

    dataset_name: Literal["random", "prefix_repetition", "sharegpt", "trace"] = "random"
    """Sets what is sent: random prompts ("random"), groups of prompts that share a prefix ("prefix_repetition"),
    conversations of --dataset-path ("sharegpt"), or arrivals and lengths of --dataset-path ("trace")."""
    dataset_path: str = ""
    """Names the file for sharegpt (JSON) or trace (one JSON object on each line, or CSV)."""
    num_prompts: int = 100
    """Sends this many requests, at most as many as the file of --dataset-path holds."""
    request_rate: float = math.inf
    """Sets the mean number of requests sent per second, at random times; inf sends all at once. A trace has its own
    times."""
    burstiness: float = 1.0
    """Sets the shape of the gamma distribution of the times between requests: 1 is a Poisson process, less gives
    bursts, more gives even arrivals."""
    random_input_len: int = 256
    """Sets the prompt tokens of random requests."""
    random_output_len: int = 64
    """Sets the new tokens of random requests."""
    random_range_ratio: float = 0.0
    """Draws each length of a random request from the range 1 - this to 1 + this times the given length."""
    random_prefix_len: int = 0
    """Sets the tokens of a prefix that all random requests share, in addition to their own prompt tokens."""
    prefix_repetition_prefix_len: int = 256
    """Sets the tokens of a shared prefix."""
    prefix_repetition_suffix_len: int = 64
    """Sets the tokens that follow a shared prefix."""
    prefix_repetition_num_prefixes: int = 10
    """Sets the number of shared prefixes."""
    prefix_repetition_output_len: int = 64
    """Sets the new tokens of requests with shared prefixes."""
    sharegpt_output_len: int = 0
    """Sets the new tokens of every request from a file of conversations; 0 takes the length of the answer in the file
    (counted as four characters per token)."""
    trace_speedup: float = 1.0
    """Replays a trace this many times as fast as it was recorded; inf sends all at once."""
    seed: int = 0
    """Seeds the generator of prompts, lengths and arrivals."""

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ConfigError(f"--dataset-name is {self.dataset_name!r}, must be one of {', '.join(DATASETS)}")
        if (self.dataset_name in ("sharegpt", "trace")) != bool(self.dataset_path):
            raise ConfigError("--dataset-path is needed with, and only with, --dataset-name sharegpt or trace")
        at_least(self, {"num_prompts": 1, "random_input_len": 1, "random_output_len": 1, "random_prefix_len": 0})
        least = ("prefix_repetition_suffix_len", "prefix_repetition_num_prefixes", "prefix_repetition_output_len")
        at_least(self, dict.fromkeys(least, 1) | {"prefix_repetition_prefix_len": 0, "sharegpt_output_len": 0})
        for name in ("request_rate", "burstiness", "trace_speedup"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}, must be more than 0")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio is {self.random_range_ratio}, must be at least 0 and less than 1")


@dataclass(frozen=True)
class Item:
    """One request of the workload, sent `at` seconds after the beginning."""

    at: float
    prompt: Prompt
    output_len: int


def workload(config: WorkloadConfig) -> list[Item]:
    """Returns the requests in the order of sending. ConfigError for a file that cannot be read, naming its line."""
    draw = random.Random(config.seed)
    if config.dataset_name == "trace":
        return list(_trace(config, draw))
    made: Iterable[tuple[Prompt, int]] = {
        "random": _random,
        "prefix_repetition": _prefixes,
        "sharegpt": _sharegpt,
    }[config.dataset_name](config, draw)
    moments = _moments(config, draw)
    return [Item(next(moments), prompt, output_len) for prompt, output_len in made]


def as_text(prompt: Prompt) -> str:
    """A made-up prompt for an endpoint that takes only text: about as many tokens, the same text for the same ids."""
    return prompt if isinstance(prompt, str) else " ".join(_WORDS[token % len(_WORDS)] for token in prompt)


_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at",
    "be", "this", "from", "have", "or", "by", "one", "had", "not",
)  # fmt: skip


def _moments(config: WorkloadConfig, draw: random.Random) -> Iterator[float]:
    moment = 0.0
    while True:
        yield moment
        if config.request_rate != math.inf:
            moment += draw.gammavariate(config.burstiness, 1 / (config.request_rate * config.burstiness))


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def _random(config: WorkloadConfig, draw: random.Random) -> Iterator[tuple[Prompt, int]]:
    prefix = _ids(draw, config.random_prefix_len)

    def length(mean: int) -> int:
        spread = config.random_range_ratio
        return max(1, draw.randint(math.floor(mean * (1 - spread)), math.ceil(mean * (1 + spread))))

    for _ in range(config.num_prompts):
        yield prefix + _ids(draw, length(config.random_input_len)), length(config.random_output_len)


def _prefixes(config: WorkloadConfig, draw: random.Random) -> Iterator[tuple[Prompt, int]]:
    count = config.prefix_repetition_num_prefixes
    prefixes = [_ids(draw, config.prefix_repetition_prefix_len) for _ in range(count)]
    order = [i % count for i in range(config.num_prompts)]
    draw.shuffle(order)
    for group in order:
        suffix = _ids(draw, config.prefix_repetition_suffix_len)
        yield prefixes[group] + suffix, config.prefix_repetition_output_len


def _sharegpt(config: WorkloadConfig, draw: random.Random) -> Iterator[tuple[Prompt, int]]:
    try:
        entries = json.loads(_read(config.dataset_path))
    except ValueError as error:
        raise ConfigError(f"--dataset-path {config.dataset_path} is no JSON: {error}") from None
    found: list[tuple[Prompt, int]] = []
    for entry in entries if isinstance(entries, list) else []:
        turns: list[Any] = (entry.get("conversations") or []) if isinstance(entry, dict) else []
        texts: list[Any] = [turn.get("value", turn.get("content", "")) for turn in turns[:2] if isinstance(turn, dict)]
        if len(texts) == 2 and all(isinstance(text, str) and text for text in texts):
            found.append((texts[0], config.sharegpt_output_len or max(4, len(texts[1]) // CHARS_PER_TOKEN)))
    if not found:
        raise ConfigError(f"--dataset-path {config.dataset_path} has no conversation of two turns")
    draw.shuffle(found)
    yield from found[: config.num_prompts]


def _trace(config: WorkloadConfig, draw: random.Random) -> Iterator[Item]:
    """Made-up prompts of the lengths of a file, at its moments; blocks of one name are equal."""
    blocks: dict[int, list[int]] = {}
    for request in read_trace(config.dataset_path, config.num_prompts):
        known = request.blocks[: request.input_len // BLOCK_TOKENS]
        prompt = [token for name in known for token in _block(config.seed, blocks, name)]
        prompt += _ids(draw, request.input_len - len(prompt))
        yield Item(request.at / config.trace_speedup, prompt, request.output_len)


def _block(seed: int, blocks: dict[int, list[int]], name: int) -> list[int]:
    if name not in blocks:
        blocks[name] = _ids(random.Random(f"{seed} {name}"), BLOCK_TOKENS)
    return blocks[name]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
