"""The real engine on a tiny model: bit for bit the same tokens and log-probabilities, whatever the pool, the chunks,
the prefix hits and the interruptions, in every format of the cache."""

from __future__ import annotations

import dataclasses
import random

import pytest

from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.engine.setup import load_engine
from allspan.worker.parallel.local import LocalCollectives
from support.cores import Collected, request, step_until_idle
from support.tiny_models import save_tiny

pytest.importorskip("allspan.kernels.cpu._native", reason="the compiled kernels promise it; they are not built")

VOCAB = 131


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "llama", eos_token_id=None, bos_token_id=None, head_dim=16, hidden_size=72)
    return folder


def conversations():
    rng = random.Random(7)
    families = [[rng.randrange(VOCAB) for _ in range(70)] for _ in range(3)]
    return [
        request(
            number,
            families[number % 3][: rng.randint(30, 70)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))],
            max_tokens=rng.randint(5, 40),
            temperature=number % 2 * 0.7,
            logprobs=2,
            prompt_logprobs=1 if number % 5 == 0 else None,
            frequency_penalty=0.3 if number % 4 == 0 else 0.0,
        )
        for number in range(12)
    ]


def engine(folder, num_pages, host_pages=0, kv="float32", **settings):
    """An engine's core, told to have so many pages, and what it tells."""
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 64, **settings}
    config = WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=128),
        ServiceConfig("-"),
        CacheConfig(page_size=16, kv_cache_dtype=kv, kv_cache_bytes=2**30),
        SchedulerConfig(**sizes),
    )
    probe = load_engine(config, op_set("cpu", 1), LocalCollectives())
    page_bytes = probe.model.cache_groups[0].spec.bytes_per_page
    cache = dataclasses.replace(
        config.cache, kv_cache_bytes=num_pages * page_bytes, host_kv_cache_bytes=host_pages * page_bytes
    )
    core = load_engine(dataclasses.replace(config, cache=cache), op_set("cpu", 1), LocalCollectives()).core
    core.on_outputs = collected = Collected()
    return core, collected


def told(collected):
    assert not collected.errors
    return {
        key: (output.token_ids, output.logprobs, output.prompt_logprobs) for key, output in collected.outputs.items()
    }


def one_by_one(folder, kv):
    core, collected = engine(folder, 64, kv=kv)
    for one in conversations():
        core.submit(one)
        step_until_idle(core)
        core.reset_prefix_cache()
    assert core.statistics().prefix_hit_tokens == 0
    return told(collected)


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """A model whose pages hold latents, in dense layers and layers of experts."""
    folder = tmp_path_factory.mktemp("latent")
    sizes = {"num_hidden_layers": 3, "vocab_size": VOCAB, "n_shared_experts": 1}
    save_tiny(folder, "deepseek_v2", eos_token_id=None, bos_token_id=None, **sizes)
    return folder


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "uint4"])
def test_a_pool_that_preempts_all_the_time_gives_the_tokens_of_an_endless_one(tiny, kv):
    assert_all_pools_agree(tiny, kv)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "uint4", "fp8"])
def test_pages_of_latents_are_shared_freed_and_moved_as_others_are(latent, kv):
    assert_all_pools_agree(latent, kv)


def assert_all_pools_agree(tiny, kv):
    expected = one_by_one(tiny, kv)
    for num_pages, host_pages, budget in ((200, 0, 512), (9, 0, 64), (9, 24, 7)):
        core, collected = engine(tiny, num_pages, host_pages, kv, max_num_batched_tokens=budget)
        for one in conversations():
            core.submit(one)
        step_until_idle(core)
        counters = core.statistics()
        assert told(collected) == expected, f"{num_pages} pages, {host_pages} on the host, {budget} tokens a step"
        assert (counters.preemptions > 0) == (num_pages == 9)
        assert counters.prefix_hit_tokens > 0
        assert (counters.prefix_host_hit_tokens > 0) == (host_pages > 0)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "uint4"])
def test_a_resumed_request_goes_on_with_the_very_same_bits(tiny, kv):
    expected = one_by_one(tiny, kv)
    core, collected = engine(tiny, 30, kv=kv)
    for one in conversations():
        tokens = expected[one.request_id][0]
        one.num_resumed = len(tokens) // 2
        one.output_token_ids = list(tokens[: one.num_resumed])
        core.submit(one)
    step_until_idle(core)
    for one in conversations():
        tokens, logprobs, _ = expected[one.request_id]
        half = len(tokens) // 2
        assert told(collected)[one.request_id] == (tokens[half:], logprobs[half:], ())
