"""Requests that ask for every kind of sampling, and what they get from a tiny model with the compiled kernels."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from allspan.kernels.table import op_set
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.results import Output
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.protos.config.speculation import Speculation
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.setup import load_engine
from allspan.worker.models.model import Model
from allspan.worker.models.spec import HeadSpec
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts
from allspan.worker.scheduler.request import Request
from support.byte_tokenizer import byte_tokenizer
from support.cores import Collected, request, step_until_idle
from support.threads import ThreadWorld

VOCAB, EOS, PAGE = 260, 257, 16
SCHEMA = Grammar("json_schema", '{"properties": {"name": {"type": "integer"}}, "required": ["name"]}')
ASKED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.02},
    {"temperature": 1.0, "typical_p": 0.7},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.7, "no_repeat_ngram_size": 2},
    {"temperature": 0.0, "bad_words_ids": ((7,), (8, 9)), "logit_bias": {3: 2.0}},
    {"temperature": 1.0, "stop_token_ids": tuple(range(0, 256, 9)), "min_tokens": 6},
    {"temperature": 1.0, "stop_words_ids": tuple((token,) for token in range(0, 256, 11))},
    {"temperature": 0.8, "allowed_token_ids": tuple(range(40, 60)), "prompt_logprobs": 2},
    {"temperature": 1.0, "grammar": SCHEMA},
    {"temperature": 1.0, "grammar": Grammar("regex", "[a-f]{3}(one|two) and [0-9]{2,30}")},
    {"temperature": 0.0, "grammar": Grammar("choice", '["a first answer", "a second answer"]')},
    {"temperature": 0.0, "max_tokens": 2},
]
FEW: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, 97, 7)), "min_tokens": 5},
    {"temperature": 0.0, "max_tokens": 2},
    {"temperature": 0.0, "prompt_logprobs": 2},
]


def asked() -> list[Request]:
    rng = random.Random(5)
    family = [rng.randrange(256) for _ in range(40)]
    requests = []
    for number, params in enumerate(ASKED):
        prompt = family[: rng.randint(20, 40)] + [number] * rng.randint(1, 5)
        requests.append(request(number, prompt, **{"max_tokens": 24, "logprobs": 20, **params}))
    return requests


def few_asked() -> list[Request]:
    """Requests of a fake model, which has 97 tokens."""
    prompts = [[number + 1, *range(5, 5 + 3 * number)] for number in range(len(FEW))]
    return [
        request(number, prompt, **{"max_tokens": 20, **params})
        for number, (prompt, params) in enumerate(zip(prompts, FEW, strict=True))
    ]


def play(
    folder: Path,
    asks: Speculation | None = None,
    requests: Sequence[Request] = (),
    size: int = 1,
    num_pages: int = 400,
    budget: int = 64,
    later: Sequence[Request] = (),
    **settings: object,
) -> tuple[dict[bytes, Output], SchedulerCounters]:
    """What each request gets on `size` ranks, those of `later` when the others are over; and what the leader has
    counted."""
    asked_for = str(settings.pop("speculative_config", ""))
    config = WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=128, **settings),  # type: ignore[arg-type]
        ServiceConfig("-"),
        CacheConfig(page_size=PAGE, kv_cache_bytes=2**30),
        SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=budget, speculative_config=asked_for),
    )
    world, collected, cores = ThreadWorld(size), Collected(), dict[int, EngineCore]()

    def on_rank(rank: int) -> None:
        collectives = world.collectives[rank] if size > 1 else LocalCollectives()
        loaded = load_engine(config, op_set("cpu", 1), collectives, world.channels[rank] if size > 1 else None)
        core, drafter = loaded.core, loaded.draft_model
        core.grammars.load_tokenizer = byte_tokenizer
        cores[rank] = core
        if rank == 0 and asks is not None:
            facts = None if drafter is None else DrafterFacts(drafter.max_model_len, follows=is_head(drafter))
            core.draft_with(asks, drafter=facts)
        for each in copy.deepcopy([*(requests or asked()), *(later if rank else ())]):
            core.submit(each)
        world.barrier.wait(60)
        if rank == 0:
            core.on_outputs = collected
            step_until_idle(core)
            for each in copy.deepcopy(later):
                core.submit(each)
            step_until_idle(core)
            core.shutdown()
        core.run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: (num_pages,) * len(demand.groups)
        )
        patch.setattr("allspan.worker.engine.setup.ends_of", lambda model, spec: (EOS,))
        world.run(on_rank)
    assert not collected.errors
    if drafting := cores[0]._planner.scheduler.drafting:
        assert (drafting._proposed, drafting._acceptance._requests) == ({}, {})
    return collected.outputs, cores[0]._planner.scheduler.counters


def is_head(drafter: Model) -> bool:
    """Whether it takes in every step of the model that it drafts for."""
    return isinstance(drafter.spec, HeadSpec)


def told(outputs: dict[bytes, Output]) -> dict[bytes, tuple[object, ...]]:
    """All but how long it took."""
    return {
        key: (each.token_ids, each.logprobs, each.finish_reason, each.stop_token_id, each.prompt_logprobs)
        for key, each in outputs.items()
    }
