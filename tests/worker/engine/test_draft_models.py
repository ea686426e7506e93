"""Draft models with the compiled kernels: tokens and log-probabilities are the very same bits as without, whichever
model drafts, on one and two ranks, in chunks, preempted, resumed, and in pages that others find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import CheckpointError, ConfigError, ModelNotFound
from allspan.protos.api.results import Output
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.speculation import Speculation
from allspan.worker.engine.engine import Engine
from allspan.worker.models.model import Model
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts
from allspan.worker.scheduler.request import Request
from support.cores import request
from support.drafted import VOCAB, asked, play, told
from support.tiny_models import save_tiny

pytest.importorskip("allspan.kernels.cpu._native", reason="the compiled kernels promise it; they are not built")

FIXED = {"eos_token_id": None, "bos_token_id": None, "head_dim": 16, "hidden_size": 72}
DRAFTS: dict[str, dict[str, Any]] = {
    "another family": {"name": "qwen3", "hidden_size": 96, "vocab_size": VOCAB},
    "fewer layers": {"num_hidden_layers": 1, "vocab_size": VOCAB},
    "fewer tokens": {"vocab_size": 200},
    "padding": {"vocab_size": 320},
    "a shorter context": {"max_position_embeddings": 48, "vocab_size": VOCAB},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "itself", "llama", vocab_size=VOCAB, **FIXED)
    for name, values in DRAFTS.items():
        save_tiny(root / name, **({"name": "llama"} | FIXED | values))
    return {each.name: each for each in root.iterdir()}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[int, dict[bytes, Output]]:
    """What everyone gets without drafts, by the number of ranks."""
    return {size: play(folders["itself"], size=size)[0] for size in (1, 2)}


def drafted(
    folders: dict[str, Path], draft: str, *requests: Request, **settings: Any
) -> tuple[dict[bytes, Output], SchedulerCounters]:
    """What requests get while the model `draft` drafts for them, whether it pays or not."""
    asks = json.dumps({"model": str(folders[draft]), **settings.pop("keys", {})})
    return play(folders["itself"], Speculation("draft_model", 4), requests, speculative_config=asks, **settings)


@pytest.mark.parametrize(
    ("draft", "size", "limits"),
    [
        ("itself", 1, {}),
        ("itself", 2, {"num_pages": 6}),
        ("another family", 1, {"num_pages": 6, "budget": 20}),
        ("another family", 2, {}),
        ("fewer layers", 1, {"keys": {"quantization": "a8w8"}}),
        ("fewer tokens", 2, {}),
        ("padding", 1, {}),
        ("a shorter context", 1, {"budget": 24}),
    ],
)
def test_tokens_and_logprobs_are_the_same_bits(
    folders: dict[str, Path], plain: dict[int, dict[bytes, Output]], draft: str, size: int, limits: dict[str, Any]
) -> None:
    outputs, counters = drafted(folders, draft, size=size, **limits)
    assert told(outputs) == told(plain[size])
    assert counters.draft_tokens
    assert counters.preemptions if "num_pages" in limits else not counters.preemptions


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_accepts_its_own_drafts(folders: dict[str, Path], size: int) -> None:
    """Sampled ones, too: the same number draws the same token."""
    draws: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}]
    requests = [request(number, range(number, 30), max_tokens=30, **draw) for number, draw in enumerate(draws)]
    outputs, counters = drafted(folders, "itself", *requests, size=size)
    assert told(outputs) == told(play(folders["itself"], requests=requests, size=size)[0])
    assert counters.accepted_tokens == counters.draft_tokens > 60


def test_requests_that_another_world_began_go_on_with_the_same_bits(
    folders: dict[str, Path], plain: dict[int, dict[bytes, Output]]
) -> None:
    requests = [each for each in asked() if each.params.prompt_logprobs is None]
    for each in requests:
        tokens = plain[1][each.request_id].token_ids
        each.num_resumed = len(tokens) // 2
        each.output_token_ids = list(tokens[: each.num_resumed])
    outputs, counters = drafted(folders, "itself", *requests)
    for each in requests:
        assert outputs[each.request_id].token_ids == plain[1][each.request_id].token_ids[each.num_resumed :]
    assert counters.accepted_tokens


@pytest.mark.parametrize("draft", ["itself", "another family"])
def test_no_page_that_others_find_has_the_keys_of_rejected_drafts(folders: dict[str, Path], draft: str) -> None:
    first = request(1, range(30), max_tokens=60, temperature=1.0)
    answer = play(folders["itself"], requests=[first])[0][first.request_id].token_ids
    then = request(2, (*range(30), *answer[:-1]), max_tokens=20, logprobs=5)
    expected, _ = play(folders["itself"], requests=[then])
    _, alone = drafted(folders, draft, first)
    outputs, counters = drafted(folders, draft, first, later=[then])
    assert told(outputs)[then.request_id] == told(expected)[then.request_id]
    assert counters.prefix_hit_tokens >= 64
    if draft == "itself":  # a stale key of the drafter would make its drafts wrong
        kept = counters.accepted_tokens - alone.accepted_tokens
        assert kept == counters.draft_tokens - alone.draft_tokens >= 14


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
def test_experts_and_latents_are_drafted_for_by_the_engines_own_switch(
    folders: dict[str, Path], tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allspan.worker.engine.core.step_times", lambda *arguments: {1: 1.0, 64: 1.1})
    monkeypatch.setattr("allspan.worker.engine.setup.step_times", lambda *arguments: {1: 0.01, 64: 0.02})
    save_tiny(tmp_path, family, eos_token_id=None, bos_token_id=None, vocab_size=VOCAB, num_hidden_layers=2)
    requests = [request(number, range(number, 20), max_tokens=20) for number in range(3)]
    expected, _ = play(tmp_path, requests=requests)
    asks = json.dumps({"model": str(folders["fewer layers"])})
    outputs, counters = play(tmp_path, requests=requests, speculative_config=asks)
    assert told(outputs) == told(expected)
    assert counters.drafts


@pytest.mark.parametrize(
    ("keys", "settings", "why"),
    [
        ({"draft_tensor_parallel_size": 2}, {}, "draft_tensor_parallel_size is 2, must be the model's 1 rank"),
        ({"model": "/nowhere"}, {}, "the model that drafts .* /nowhere"),
        ({"quantization": "x"}, {}, "the model that drafts .* quantization 'x' is not known"),
        ({}, {"size": 2, "data_parallel_attention": True}, "does not go with data_parallel_attention"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(
    folders: dict[str, Path], keys: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    with pytest.raises((ConfigError, ModelNotFound), match=why):
        drafted(folders, "itself", keys=keys, **settings)


def test_a_model_with_windows_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    window = {"sliding_window": 24, "layer_types": ["sliding_attention"], "use_sliding_window": True}
    save_tiny(tmp_path, "qwen2", eos_token_id=None, vocab_size=VOCAB, num_hidden_layers=1, **window)
    with pytest.raises(ConfigError, match="has layers with a sliding window"):
        drafted(folders | {"windowed": tmp_path}, "windowed")


def held(model: Model) -> int:
    """Elements of its weights that are not zero: those of whole pages of memory are once these are given back."""
    return sum(int(tensor.count_nonzero()) for tensor in model.weights.values())


def test_weights_of_both_models_are_unloaded_and_read_again(folders: dict[str, Path]) -> None:
    asks = json.dumps({"model": str(folders["itself"])})
    with Engine(folders["itself"], speculative_config=asks, threads=1, max_num_seqs=2, max_model_len=64) as engine:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        ids = [completion.token_ids for completion in engine.generate([[1, 2, 3]], params)]
        assert engine.statistics().ranks[0].weight_bytes == 2 * engine._loaded.model.weight_bytes
        drafting = engine._loaded.draft_model
        assert drafting is not None
        before = held(drafting)
        engine.stop_model()
        engine.unload_weights()
        assert held(drafting) < before // 2
        engine.reload_weights()
        engine.start_model()
        assert [completion.token_ids for completion in engine.generate([[1, 2, 3]], params)] == ids
        assert held(drafting) == before


def test_a_reload_is_refused_as_a_whole_where_another_model_would_draft(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    model = save_tiny(one, "llama", vocab_size=VOCAB, **FIXED)
    save_tiny(other, "llama", vocab_size=VOCAB, **FIXED)
    asks = json.dumps({"model": str(other)})
    with Engine(one, speculative_config=asks, threads=1, max_num_seqs=2, max_model_len=64) as engine:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        ids = [completion.token_ids for completion in engine.generate([[1, 2, 3]], params)]
        model.lm_head.weight.data *= -1
        model.save_pretrained(one)
        save_tiny(other, "llama", vocab_size=VOCAB, num_hidden_layers=1, **FIXED)
        engine.stop_model()
        with pytest.raises(CheckpointError, match="other: another model lies here now"):
            engine.reload_weights()
        engine.start_model()
        assert [completion.token_ids for completion in engine.generate([[1, 2, 3]], params)] == ids
        save_tiny(other, "llama", vocab_size=VOCAB, **FIXED)
        engine.stop_model()
        engine.reload_weights()
        engine.start_model()
        assert [completion.token_ids for completion in engine.generate([[1, 2, 3]], params)] != ids


def test_keys_of_the_drafter_come_back_from_the_host_tier(folders: dict[str, Path]) -> None:
    asks = json.dumps({"model": str(folders["itself"]), "num_speculative_tokens": 4})
    settings: dict[str, Any] = {"threads": 1, "max_num_seqs": 1, "max_model_len": 128, "page_size": 16}
    params = SamplingParams(max_tokens=20, temperature=0.0)
    prompts = [[number, *range(60)] for number in range(4)]
    with Engine(folders["itself"], **settings) as engine:
        plain = [each.token_ids for each in engine.generate(prompts, params)]
    pages = {"kv_cache_bytes": 1, "host_kv_cache_bytes": 2**24}
    with pytest.raises(ConfigError, match="kv_cache_bytes to at least") as refused:
        Engine(folders["itself"], speculative_config=asks, **settings, **pages)
    pages["kv_cache_bytes"] = int(str(refused.value).split()[-1])  # one context, of both models
    with Engine(folders["itself"], speculative_config=asks, **settings, **pages) as engine:
        engine._core.draft_with(Speculation("draft_model", 4), drafter=DrafterFacts(128))
        for _ in range(2):
            assert [each.token_ids for each in engine.generate(prompts, params)] == plain
        told = engine.statistics()
    assert told.prefix_host_hit_tokens >= 3 * 48
    assert told.accepted_tokens == told.draft_tokens > 60
