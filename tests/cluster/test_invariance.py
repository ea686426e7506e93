"""A request's tokens and logprobs are the same bits however it is run, on two ranks, in every KV format."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.engine import Completion
from support.byte_model import page_bytes

pytestmark = pytest.mark.timeout(180)

PAGE, CONTEXT = 16, 192
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=3)
SAMPLED = GREEDY.with_(temperature=0.8, top_p=0.95, seed=11, repetition_penalty=1.1, presence_penalty=0.3)


def prompts(count: int, most: int) -> list[list[int]]:
    source = random.Random(8)
    return [[source.randrange(255) for _ in range(source.randint(1, most))] for _ in range(count)]


def bits(done: Completion) -> tuple[object, ...]:
    return done.token_ids, done.logprobs


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in ("float32", "int8", "uint4"))]
)
def test_alone_chunked_hit_preempted_and_among_64_are_the_same_bits(
    start_tiny: Callable[..., ClientEngine], tiny: Path, dtype: str
) -> None:
    """A step takes 128 tokens: a prompt alone is one chunk, and may be many among 64; 60 pages are too few then."""
    pages = 60 * page_bytes(tiny, 2, PAGE, dtype)
    watched = prompts(4, 120)
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED]
    sizes = {"page_size": PAGE, "max_model_len": CONTEXT, "kv_cache_bytes": pages, "kv_cache_dtype": dtype}
    with start_tiny(max_num_seqs=64, max_num_batched_tokens=128, **sizes) as engine:
        alone = [engine.generate([prompt], each)[0] for prompt, each in zip(watched, params, strict=True)]
        hit = [engine.generate([prompt], each)[0] for prompt, each in zip(watched, params, strict=True)]
        others = prompts(64, 120)[4:]
        both = [GREEDY.with_(logprobs=None), SAMPLED.with_(logprobs=None)]
        crowd = engine.generate([*others[:30], *watched, *others[30:]], [*both * 15, *params, *both * 15])
        assert engine.statistics().preemptions > 0
        assert engine.statistics().pages_total == 60
    assert any(done.cached_tokens for done in hit)
    assert [*map(bits, hit)] == [*map(bits, alone)]
    assert [*map(bits, crowd[30:34])] == [*map(bits, alone)]
