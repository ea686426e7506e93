"""`allspan bench ops`: where the time of prefill and of decode goes, op by op, on the leader."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import ask, greedy, random_prompt
from allspan.client.bench.report import columns
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError

_DECODE_ATTEMPTS = 5
"""Most attempts to profile decoding: on a busy machine the profile may start only after a short run's end."""


@dataclass(frozen=True)
class OpsConfig:
    """The settings of the op benchmark."""

    batch_size: int = 1
    """Sends this many requests at once."""
    input_len: int = 512
    """Sets the prompt tokens of each request; they are drawn at random."""
    output_len: int = 64
    """Sets the new tokens of each request."""
    repeats: int = 1
    """Reads the prompts this many times while prefill is timed."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        at_least(self, {"batch_size": 1, "input_len": 1, "output_len": 2, "repeats": 1})


def prepare(config: OpsConfig, options: Options) -> Options:
    options = {"max_num_seqs": max(config.batch_size, 64), **options}
    return with_context(options, config.input_len + config.output_len, "--input-len + --output-len")


def measure(engine: ClientEngine, config: OpsConfig, options: Options) -> Report:
    draw = random.Random(config.seed)

    def batch() -> list[list[int]]:
        return [random_prompt(draw, engine, config.input_len) for _ in range(config.batch_size)]

    asyncio.run(_read(engine, batch()))  # warms up
    engine.start_profile()
    for _ in range(config.repeats):
        asyncio.run(_read(engine, batch()))
    engine.stop_profile()
    report: Report = {"prefill": _profile(engine)}
    for _ in range(_DECODE_ATTEMPTS):
        asyncio.run(_decode(engine, batch(), config.output_len))
        report["decode"] = _profile(engine)
        if report["decode"]:
            return report
    raise ConfigError(f"--output-len is {config.output_len}: decode was over before it could be timed, give more")


def _profile(engine: ClientEngine) -> list[Report]:
    return [asdict(op) for op in engine.op_profile()]


async def _read(engine: ClientEngine, prompts: list[list[int]]) -> None:
    await asyncio.gather(*(ask(engine, prompt, greedy(1)) for prompt in prompts))


async def _decode(engine: ClientEngine, prompts: list[list[int]], output_len: int) -> None:
    """The profile begins when every request has a first token."""
    opened = await asyncio.gather(*(engine.astart_request(prompt, greedy(output_len)) for prompt in prompts))
    try:
        for _, queue in opened:
            await queue.aget()
        await asyncio.to_thread(engine.start_profile)
        for _, queue in opened:
            async for _ in queue:
                pass
        await asyncio.to_thread(engine.stop_profile)
    finally:
        for handle, _ in opened:
            engine.release_request(handle)


def table(report: Report) -> str:
    parts = []
    for phase in ("prefill", "decode"):
        rows = [(phase, "kernel", "calls", "min ms", "max ms", "total ms", "share")]
        for op in report[phase]:
            times = (f"{op['min_ms']:.3f}", f"{op['max_ms']:.3f}", f"{op['total_ms']:.1f}")
            rows.append((op["op"], op["kernel"] or "-", str(op["count"]), *times, f"{100 * op['share']:.1f} %"))
        parts.append(columns(rows))
    return "\n\n".join(parts)


OPS = Benchmark("ops", "Measures the time of each operation of the model.", OpsConfig, prepare, measure, table)
