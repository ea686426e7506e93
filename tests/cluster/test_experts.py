"""Four ranks with whole experts: the tokens of one process, also while experts change ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan import ClientEngine, Engine, SamplingParams
from support.byte_model import save_byte_model
from support.streams import Streams

pytestmark = pytest.mark.timeout(120)

TOKENS = 100
PROMPTS = [[7, 9, 200], list(range(80)), [1], [50] * 30]


def test_experts_on_four_ranks_and_moving_between_them_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    model = save_byte_model(tmp_path / "model", "qwen2_moe", max_position_embeddings=1024)
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(model, threads=1) as engine:
        expected = [done.token_ids for done in engine.generate(PROMPTS, greedy)]
        (alone,) = {load.imbalance for load in engine.statistics().experts}
    assert alone == 1.0
    cluster = ClientEngine(
        model,
        ranks=4,
        threads=1,
        oversubscribe=True,
        startup_timeout=100.0,
        enable_expert_parallel=True,
        redundant_experts=2,
    )
    with cluster as engine:
        assert [done.token_ids for done in engine.generate(PROMPTS, greedy)] == expected
        before = engine.statistics().experts
        assert [load.choices for load in before] == [2 * (114 + 4 * (TOKENS - 1)), 2 * 4 * TOKENS]
        streams = Streams(engine, PROMPTS, [greedy] * len(PROMPTS))
        streams.read_until(lambda: streams.count >= TOKENS, 30.0, f"{TOKENS} tokens")
        engine.rebalance_experts(30.0)
        assert streams.read_to_the_end() == expected
        after = engine.statistics().experts
        assert max(load.imbalance for load in after) < max(load.imbalance for load in before)
        engine.reset_prefix_cache()
        assert [done.token_ids for done in engine.generate(PROMPTS, greedy)] == expected
