"""Qwen 1 beyond its original context: the length of a request's prompt chooses its rotary table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allspan import Engine, SamplingParams
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
