"""Requests with adapters in one process: each one's tokens are those of merged weights, whatever runs beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan import Engine, SamplingParams
from allspan.protos.api.errors import AdapterNotFound, ConfigError
from allspan.protos.api.options import RequestOptions
from allspan.protos.config.speculation import Speculation
from allspan.worker.models.holding import Holding
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts
from support.draft_heads import save_eagle3
from support.peft_adapters import greedy_tokens, merged, save_adapter
from support.tiny_models import prompt, save_tiny

NAMES = ("", "one", "two")
PROMPT = prompt(40, 97)
SHORT = [prompt(14, 97, seed) for seed in range(3)]
COUNT = 24
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=3)


class Adapted:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = save_tiny(folder / "base", "qwen2")
        one = save_adapter(folder / "one", model, 8, r=8, seed=1)
        two = save_adapter(folder / "two", model, 16, ("q_proj", "v_proj", "gate_proj"), r=16, seed=2)
        self.models = {"": model, "one": merged(model, one), "two": merged(model, two)}

    def engine(self, **settings: Any) -> Engine:
        modules = (f"one={self.folder / 'one'}", f"two={self.folder / 'two'}")
        return Engine(self.folder / "base", lora_modules=modules, max_model_len=64, threads=1, page_size=16, **settings)

    def tokens(self, name: str, ids: list[int]) -> tuple[int, ...]:
        return greedy_tokens(self.models[name], ids, COUNT)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def test_adapters_side_by_side_in_chunks_and_preempted_keep_their_tokens_and_bits(adapted: Adapted) -> None:
    wanted = [(name, ids) for ids in SHORT for name in NAMES]
    with adapted.engine() as engine:
        alone = [engine.generate([ids], GREEDY, RequestOptions(adapter=name))[0] for name, ids in wanted]
    for (name, ids), done in zip(wanted, alone, strict=True):
        assert done.token_ids == adapted.tokens(name, ids), name
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # of a tiny model: too few pages for nine requests
    with adapted.engine(max_num_batched_tokens=7, kv_cache_bytes=6 * page_bytes) as engine:
        handles = [engine.start_request(ids, GREEDY, options=RequestOptions(adapter=name)) for name, ids in wanted]
        for (handle, queue), expected in zip(handles, alone, strict=True):
            outputs = list(queue)
            assert tuple(token for output in outputs for token in output.token_ids) == expected.token_ids
            found = [entry.logprob for output in outputs for entry in output.logprobs]
            assert found == [entry.logprob for entry in expected.logprobs]
            engine.release_request(handle)
        assert engine.statistics().preemptions > 0


def test_one_prompt_under_two_adapters_and_without_shares_no_page(adapted: Adapted) -> None:
    with adapted.engine() as engine:
        for _ in range(2):
            for name in NAMES:
                (done,) = engine.generate([PROMPT], GREEDY, RequestOptions(adapter=name))
                assert done.token_ids == adapted.tokens(name, PROMPT)
            hits = engine.statistics().prefix_hit_tokens
    assert hits == len(NAMES) * 32  # of the second round alone: two full pages before the last token


def test_an_adapter_that_is_not_there_is_refused_and_harms_no_other(adapted: Adapted) -> None:
    with adapted.engine() as engine:
        with pytest.raises(AdapterNotFound, match="'three'"):
            engine.generate([PROMPT], GREEDY, RequestOptions(adapter="three"))
        (done,) = engine.generate([PROMPT], GREEDY, RequestOptions(adapter="one"))
    assert done.token_ids == adapted.tokens("one", PROMPT)


def test_an_adapter_that_cannot_be_loaded_is_named_before_weights_are_read(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holding, "read", lambda *_: pytest.fail("the weights are read"))
    with pytest.raises(ConfigError, match=r"the adapter 'two' cannot be loaded: .*has rank 16, max_lora_rank is 8"):
        adapted.engine(max_lora_rank=8)


def test_a_path_may_begin_with_the_home_folder(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(adapted.folder))
    with Engine(adapted.folder / "base", lora_modules=["one=~/one"], max_model_len=64, threads=1) as engine:
        (done,) = engine.generate([PROMPT], GREEDY, RequestOptions(adapter="one"))
    assert done.token_ids == adapted.tokens("one", PROMPT)


def test_steps_with_adapters_and_without_are_timed_together(adapted: Adapted) -> None:
    with adapted.engine() as engine:
        engine.start_profile()
        for name in NAMES:
            engine.generate([PROMPT], GREEDY, RequestOptions(adapter=name))
        engine.stop_profile()
        found = engine.op_profile()
    assert len({(op.op, op.kernel) for op in found}) == len(found)
    assert sum(op.share for op in found) == pytest.approx(1.0)
    assert all(op.count and op.min_ms > 0 for op in found)


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_drafts_change_no_bit_under_any_adapter(adapted: Adapted, method: str) -> None:
    """A model that drafts has no adapter itself."""
    wanted = [(name, ids) for ids in SHORT for name in NAMES]
    asks = {"method": method, "num_speculative_tokens": 7}
    if method == "draft_model":
        asks["model"] = str(adapted.folder / "base")
    with adapted.engine(speculative_config=json.dumps(asks)) as engine:
        plain = [
            engine.generate([ids], GREEDY, RequestOptions(adapter=name, speculation=False))[0] for name, ids in wanted
        ]
        assert not engine.statistics().drafts
        drafter = engine._loaded.draft_model
        facts = DrafterFacts(drafter.max_model_len) if drafter else None
        engine._core.draft_with(Speculation(method, 7), drafter=facts)  # whether it pays or not
        for _ in range(2):  # at the second time, earlier answers of the adapter are there
            started = [engine.start_request(ids, GREEDY, options=RequestOptions(adapter=name)) for name, ids in wanted]
            for (handle, queue), expected in zip(started, plain, strict=True):
                outputs = list(queue)
                assert tuple(token for output in outputs for token in output.token_ids) == expected.token_ids
                assert [entry for output in outputs for entry in output.logprobs] == list(expected.logprobs)
                engine.release_request(handle)
        told = engine.statistics()
    assert told.accepted_tokens > (0.5 if method == "suffix" else 0.1) * len(wanted) * COUNT


def test_a_draft_head_changes_no_bit_under_any_adapter(adapted: Adapted, tmp_path: Path) -> None:
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}
    save_eagle3(tmp_path, 97, 40, width=96, wide=96, **layers)
    wanted = [(name, ids) for ids in SHORT for name in NAMES]
    with adapted.engine(speculative_config=json.dumps({"method": "eagle3", "model": str(tmp_path)})) as engine:
        plain = [
            engine.generate([ids], GREEDY, RequestOptions(adapter=name, speculation=False))[0] for name, ids in wanted
        ]
        engine._core.draft_with(Speculation("eagle3", 4), drafter=DrafterFacts(64, follows=True))
        drafted = [engine.generate([ids], GREEDY, RequestOptions(adapter=name))[0] for name, ids in wanted]
        assert engine.statistics().drafts > len(wanted)
    for (name, ids), expected, found in zip(wanted, plain, drafted, strict=True):
        assert expected.token_ids == adapted.tokens(name, ids), name
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
