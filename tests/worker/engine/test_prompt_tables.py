"""Qwen 1 beyond its original context: the length of a request's prompt chooses its rotary table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allspan import Engine, SamplingParams
from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.engine.setup import load_engine
from support.cores import Collected, request, step_until_idle
from support.threads import ThreadWorld
from support.tiny_models import prompt
from support.vendor_models import save_vendor, vendor_logits

SETTINGS: dict[str, Any] = {
    "kernels": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "page_size": 16,
}
PARAMS = SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True)
PROMPTS = [prompt(length, 97, 5) for length in (38, 41, 79, 81, 130)]
"""Beginnings of one text, in all of the three tables; the first one's answer goes past the original context."""


def check(config: Any, weights: Any, ids: list[int], tokens: tuple[int, ...]) -> None:
    """Each token is the vendor's best after those before it."""
    logits = vendor_logits(config, weights, [*ids, *tokens], prompt_len=len(ids))
    assert tuple(logits[len(ids) - 1 : -1].argmax(-1)) == tokens


@pytest.mark.parametrize("pages", [0, 12])
def test_tokens_are_the_vendors_with_chunks_prefix_hits_and_preemption(pages: int, tmp_path: Path) -> None:
    """`pages`: as few as make requests wait for each other and come back; 0: enough."""
    config, weights = save_vendor(tmp_path, "qwen")
    few = {"kv_cache_bytes": pages * 16 * 2 * 4 * 5 * 12 * 4} if pages else {}
    with Engine(tmp_path, **SETTINGS, **few) as engine:
        preemptions, cached = 0, 0
        for _ in range(2):  # the second time from cached pages
            for ids, output in zip(PROMPTS, engine.generate(PROMPTS, PARAMS), strict=True):
                check(config, weights, ids, tuple(output.token_ids))
                assert output.timings is not None
                preemptions += output.timings.preemptions
                cached += output.timings.cached_tokens
    assert cached > 0
    assert (preemptions > 0) == (pages > 0)


def test_who_is_resumed_in_another_world_keeps_the_table_of_the_prompt_on_two_ranks(tmp_path: Path) -> None:
    """What came before the world was lost makes the first request longer than the first table's prompts, the third
    longer than the second's."""
    config, weights = save_vendor(tmp_path, "qwen")
    known: list[tuple[int, ...]] = [()] * len(PROMPTS)
    for _ in range(2):
        found = served_by_two_ranks(tmp_path, known, PARAMS.max_tokens)
        for ids, before, tokens in zip(PROMPTS, known, found, strict=True):
            assert len(before) + len(tokens) == PARAMS.max_tokens
            check(config, weights, ids, (*before, *tokens))
        known = [tokens[: len(tokens) // 2] for tokens in found]


def served_by_two_ranks(folder: Path, known: list[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """The tokens of each of PROMPTS that come after the known ones."""
    settings = WorkerConfig(
        ModelConfig(str(folder), "tiny"),
        ServiceConfig("-"),
        CacheConfig(page_size=16, kv_cache_bytes=1 << 22),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
    )
    world = ThreadWorld(2)

    def run(rank: int) -> list[tuple[int, ...]]:
        core = load_engine(settings, op_set("cpu", 1), world.collectives[rank], world.channels[rank]).core
        core.on_outputs = collected = Collected()
        asked = []
        for number, (ids, tokens) in enumerate(zip(PROMPTS, known, strict=True)):
            one = request(number, ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            one.output_token_ids, one.num_resumed = list(tokens), len(tokens)
            asked.append(one)
        if rank:
            for one in asked:
                core.submit(one)
        world.barrier.wait(world.timeout)
        if rank:
            core.run()
            return []
        for one in asked:
            core.submit(one)
        step_until_idle(core)
        core.shutdown()
        core.run()
        assert not collected.errors
        return [tuple(collected.tokens(one)) for one in asked]

    return world.run(run)[0]
