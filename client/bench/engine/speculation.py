"""`allspan bench speculation`: how much sooner tokens come with drafts than without, and which drafts are kept.

One run, one cluster that drafts. Every prompt is sent with drafts and without (each request's `speculation`),
alternately and beginning with the other one each round, so that a slow drift of the machine touches both alike. Every
request has a cache salt of its own: nothing is drafted from an earlier answer to the same prompt, unless `--shared`
says that earlier answers count. Speed is that of the tokens after a request's first one. Tokens must be the same; on a
GPU, where near ties may be decided otherwise, answers that differ are counted.

With `--replay-rate` drafts are of the answer that a prompt got before, which all prompts are asked for first, each
right with that chance: so drafts of a model with random weights can be worth what real ones would be, and all that is
left to measure is what running them takes.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import Answer, ask, spread
from allspan.client.bench.report import columns, facts
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError, InternalError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.progress import Progress
from allspan.protos.config.speculation import REPLAY


@dataclass(frozen=True)
class SpeculationConfig:
    """The settings of the benchmark of speculative decoding."""

    text: str = ""
    """Names a file of UTF-8 text, of which every prompt is a part, to be gone on from."""
    dataset: str = ""
    """Names a file with a JSON object a line, whose "messages", or whose "prompt", "question" or "instruction", is
    asked as a conversation."""
    num_prompts: int = 8
    """Sends so many prompts."""
    prompt_len: int = 512
    """Sets the tokens of a prompt of --text; of --dataset, those that are longer are left out."""
    output_len: int = 256
    """Sets the new tokens of each request."""
    batch_size: int = 1
    """Sends so many of the prompts at once."""
    rounds: int = 3
    """Sends all prompts so often, with drafts and without."""
    temperature: float = 0.0
    """Sets the temperature of the requests; 0 takes the likeliest token."""
    shared: bool = False
    """Lets requests with drafts use each other's answers, of this round and of those before."""
    replay_rate: float = 0.0
    """Drafts what a prompt was answered with before, this share of the drafts right (0.01 to 1); 0 drafts as
    --speculative-config says. For measurements of what drafts cost."""
    num_drafts: int = 5
    """Sets the most drafts of a request in a step, with --replay-rate."""
    one_token: bool = False
    """Has every answer be one token again and again, which no near tie changes: for random weights."""

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "prompt_len": 1, "output_len": 2, "batch_size": 1, "rounds": 1, "temperature": 0}
        at_least(self, least | {"replay_rate": 0, "num_drafts": 1})
        if bool(self.text) == bool(self.dataset):
            raise ConfigError("give one of --text and --dataset")


def prepare(config: SpeculationConfig, options: Options) -> Options:
    path = config.text or config.dataset
    if not Path(path).is_file():
        raise ConfigError(f"--{'text' if config.text else 'dataset'} {path}: no such file")
    if config.replay_rate and "speculative_config" in options:
        raise ConfigError("give one of --replay-rate and --speculative-config")
    options = {"speculative_config": _speculation(config), "max_num_seqs": max(config.batch_size, 8), **options}
    return with_context(options, config.prompt_len + config.output_len, "--prompt-len + --output-len")


def _speculation(config: SpeculationConfig) -> str:
    if not config.replay_rate:
        return "{}"
    asked = {"method": REPLAY, "replay_rate": config.replay_rate, "num_speculative_tokens": config.num_drafts}
    return json.dumps(asked)


def measure(engine: ClientEngine, config: SpeculationConfig, options: Options) -> Report:
    prompts, is_exact = prompts_of(engine, config), options.get("device", "cpu") == "cpu"
    report = asyncio.run(_measure(engine, config, prompts, is_exact))
    return {"prompt_tokens": statistics.mean(map(len, prompts))} | report


def prompts_of(engine: ClientEngine, config: SpeculationConfig) -> list[list[int]]:
    """The token ids of each prompt. ConfigError for a file that has none."""
    path = config.text or config.dataset
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    length, count = config.prompt_len, config.num_prompts
    if config.text:
        ids = engine.tokenizer.encode(text, parse_special=False)
        return [ids[i * len(ids) // count :][:length] for i in range(count)]
    found: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if len(found) == count:
            break
        messages = _messages(line, f"{path}, line {number}") if line.strip() else None
        ids = engine.tokenizer.encode_chat(messages) if messages else []
        if 0 < len(ids) <= length:
            found.append(list(ids))
    if not found:
        raise ConfigError(f"--dataset {path} has no prompt of at most --prompt-len ({length}) tokens")
    return found


def _messages(line: str, where: str) -> list[dict[str, Any]]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--dataset {where}: no JSON: {error}") from None
    if isinstance(entry, dict):
        if isinstance(messages := entry.get("messages"), list) and messages:
            return messages
        asked = next((entry[key] for key in ("prompt", "question", "instruction") if key in entry), None)
        if isinstance(asked, str) and asked:
            return [{"role": "user", "content": asked}]
    raise ConfigError(f"--dataset {where}: has none of messages, prompt, question and instruction")


async def _measure(
    engine: ClientEngine, config: SpeculationConfig, prompts: Sequence[list[int]], is_exact: bool
) -> Report:
    """`is_exact`: tokens that differ are an error."""
    size = config.batch_size
    for first in range(0, len(prompts) if config.replay_rate else 1, size):
        await _pass(engine, config, prompts[first : first + size], False, "warm-up")
    before = await engine.astatistics()
    speeds: dict[bool, list[float]] = {True: [], False: []}
    step_s: dict[bool, list[float]] = {True: [], False: []}
    tokens = differing = 0
    with Progress("bench speculation", config.rounds, "rounds") as progress:
        for number in range(config.rounds):
            answers: dict[bool, list[Answer]] = {True: [], False: []}
            for first in range(0, len(prompts), config.batch_size):
                part = prompts[first : first + config.batch_size]
                for drafts in (True, False) if (number + first // config.batch_size) % 2 == 0 else (False, True):
                    seconds, made = await _pass(engine, config, part, drafts, f"{number}.{first}")
                    answers[drafts] += made
                    later = sum(len(answer.token_ids) - 1 for answer in made)
                    speeds[drafts].append(later / seconds)
                    step_s[drafts] += [gap for answer in made for gap in answer.gaps_s]
                    tokens += later if drafts else 0
            pairs = zip(answers[True], answers[False], strict=True)
            differing += sum(one.token_ids != other.token_ids for one, other in pairs)
            if differing and is_exact:
                raise InternalError("tokens with drafts are not those without: please report it")
            progress(number + 1)
    after = await engine.astatistics()
    runs, drafted = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
    kept = after.accepted_tokens - before.accepted_tokens
    old = [*before.accepted_per_position, *[0] * len(after.accepted_per_position)]
    positions = [count - old[i] for i, count in enumerate(after.accepted_per_position)]
    return {
        "with_drafts_tokens_per_s": spread(speeds[True]),
        "without_tokens_per_s": spread(speeds[False]),
        "ratio": spread([on / off for on, off in zip(speeds[True], speeds[False], strict=True)]),
        "with_drafts_step_s": spread(step_s[True]),
        "without_step_s": spread(step_s[False]),
        "differing_answers": differing,
        "drafts": runs,
        "draft_tokens": drafted,
        "accepted_tokens": kept,
        "acceptance": kept / drafted if drafted else 0.0,
        "accepted_per_position": [count / runs for count in positions] if runs else [],
        "tokens_per_step": tokens / max(tokens - kept, 1) if config.batch_size == 1 else None,
    }


async def _pass(
    engine: ClientEngine, config: SpeculationConfig, prompts: Sequence[list[int]], drafts: bool, name: str
) -> tuple[float, list[Answer]]:
    """Sends these prompts at once. Returns the seconds from the last first token to the end, and the answers."""

    async def one(number: int, prompt: list[int]) -> Answer:
        salt = f"{drafts}" if config.shared else f"{name}.{number}.{drafts}"
        params = SamplingParams(
            max_tokens=config.output_len,
            temperature=config.temperature,
            ignore_eos=True,
            seed=number,
            allowed_token_ids=(prompt[-1],) if config.one_token else (),
        )
        return await ask(engine, prompt, params, RequestOptions(cache_salt=salt, speculation=drafts))

    answers = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    return time.perf_counter() - max(answer.arrivals[0] for answer in answers), answers


def table(report: Report) -> str:
    rows = [("", "median", "min", "max")]
    for title, key, form in (
        ("with drafts, tokens/s", "with_drafts_tokens_per_s", ",.1f"),
        ("without, tokens/s", "without_tokens_per_s", ",.1f"),
        ("with ÷ without", "ratio", ".3f"),
    ):
        median, least, most = (format(report[key][end], form) for end in ("median", "min", "max"))
        rows.append((title, median, least, most))
    steps = (1e3 * report[key]["median"] for key in ("with_drafts_step_s", "without_step_s"))
    kept = [f"{share:.0%}" for share in report["accepted_per_position"][:8]]
    more = [
        ("drafts", f"{report['draft_tokens']:,} in {report['drafts']:,} runs, {report['acceptance']:.0%} kept"),
        ("kept by position, of all runs", ", ".join(kept) or "none"),
        ("a step with drafts and without, ms", " and ".join(f"{each:.3f}" for each in steps)),
    ]
    if report["differing_answers"]:
        more.append(("answers that differ", f"{report['differing_answers']:,}"))
    if report["tokens_per_step"]:
        more.append(("tokens a step", f"{report['tokens_per_step']:.2f}"))
    return columns(rows) + "\n\n" + facts(more)


SPECULATION = Benchmark(
    "speculation",
    "Measures decoding with drafts beside decoding without, and which drafts are kept.",
    SpeculationConfig,
    prepare,
    measure,
    table,
)
