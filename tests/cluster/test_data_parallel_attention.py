"""Two ranks that attend for requests of their own, over MPI: the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan import ClientEngine, Engine, SamplingParams
from support.byte_model import page_bytes, save_byte_model
from support.tiny_models import prompt

pytestmark = pytest.mark.timeout(120)

PAGE = 16
SIZES = {"page_size": PAGE, "max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 32}
FIRST = prompt(60, 200, 1)
PROMPTS = [FIRST[: 34 + 2 * i] if i % 2 else prompt(70, 200, 2 + i) for i in range(10)]
"""Longer than a step's tokens; every other one begins as the ones before did."""


def test_ranks_that_attend_apart_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    model = save_byte_model(tmp_path / "model", "deepseek_v2", first_k_dense_replace=1)
    params = [
        SamplingParams(max_tokens=60, temperature=0.9 * (i % 3 == 2), seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with Engine(model, threads=1, **SIZES) as engine:
        expected = [done.token_ids for done in engine.generate(PROMPTS, params)]
    pages, each = 12, page_bytes(model, 2, PAGE, "float32")
    cluster = ClientEngine(
        model,
        ranks=2,
        threads=1,
        oversubscribe=True,
        startup_timeout=100.0,
        data_parallel_attention=True,
        enable_expert_parallel=True,
        kv_cache_bytes=pages * each,
        host_kv_cache_bytes=40 * each,
        **SIZES,
    )
    with cluster as engine:
        assert [done.token_ids for done in engine.generate(PROMPTS, params)] == expected
        first = engine.statistics()
        assert first.pages_total == 2 * pages, "the pages of both ranks"
        assert first.preemptions > 0
        assert first.prefix_hit_tokens > 0
        assert [done.token_ids for done in engine.generate(PROMPTS, params)] == expected
        again = engine.statistics()
        assert again.prefix_host_hit_tokens > first.prefix_host_hit_tokens
        assert again.pages_used == 0
