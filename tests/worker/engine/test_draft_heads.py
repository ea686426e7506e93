"""Draft heads with the compiled kernels: whatever they draft, tokens and log-probabilities are the very same bits, on
one to three ranks, in chunks, preempted, and in pages that others find."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError, ConfigError, ModelNotFound
from allspan.protos.api.results import Output
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.protos.config.speculation import Speculation
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts
from support.cores import Collected, request, step_until_idle
from support.draft_heads import Mtp, save_eagle3
from support.drafted import VOCAB, play, told
from support.tiny_models import save_tiny

pytest.importorskip("allspan.kernels.cpu._native", reason="the compiled kernels promise it; they are not built")

LATENT = {
    "hidden_size": 288,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model, and what asks for a head of it."""
    folder = tmp_path_factory.mktemp("eagle3")
    sizes = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 6}
    save_tiny(folder / "model", "llama2", eos_token_id=None, bos_token_id=None, vocab_size=VOCAB, **sizes)
    save_eagle3(folder / "head", VOCAB, 90)
    return folder / "model", json.dumps({"method": "eagle3", "model": str(folder / "head")})


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token follows from the last one alone, and whose layer for multi-token prediction knows how:
    no layer adds anything, and a row of the head is an embedding of another token."""
    folder = tmp_path_factory.mktemp("mtp")
    mtp = Mtp(folder, "deepseek_v3", **LATENT)
    hidden = LATENT["hidden_size"]
    mtp.rewrite(folder, {"self_attn.o_proj": 0.0, "down_proj": 0.0}, torch.eye(hidden, 2 * hidden))
    return folder


@pytest.mark.parametrize(
    ("size", "num_pages", "budget"), [(1, 400, 64), (1, 6, 64), (1, 400, 7), (2, 400, 64), (3, 6, 20)]
)
def test_tokens_and_logprobs_are_the_same_bits(
    eagle3: tuple[Path, str], size: int, num_pages: int, budget: int
) -> None:
    folder, asks = eagle3
    plain, _ = play(folder, size=size, num_pages=num_pages, budget=budget)
    outputs, counters = play(
        folder, Speculation("eagle3", 4), size=size, num_pages=num_pages, budget=budget, speculative_config=asks
    )
    assert told(outputs) == told(plain)
    assert counters.draft_tokens
    assert counters.preemptions if num_pages < 20 else not counters.preemptions


def drafted(folder: Path, size: int, **asks: float) -> tuple[dict[bytes, Output], SchedulerCounters]:
    requests = [request(number, [number, 7, 9], max_tokens=40, logprobs=3, **asks) for number in range(3)]
    plain, _ = play(folder, requests=requests, size=size)
    found, counters = play(
        folder, Speculation("mtp", 4), requests, size=size, speculative_config='{"method": "deepseek_mtp"}'
    )
    assert told(found) == told(plain)
    return found, counters


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_that_knows_what_follows_is_right(following: Path, size: int) -> None:
    outputs, counters = drafted(following, size)
    assert all(len(set(each.token_ids)) > 30 for each in outputs.values())
    assert counters.accepted_tokens == counters.draft_tokens > 3 * 28


def test_drafts_of_sampled_tokens_are_drawn_as_these_are(following: Path) -> None:
    _, counters = drafted(following, 1, temperature=7.0)
    assert counters.accepted_tokens == counters.draft_tokens > 3 * 28


def test_pages_that_others_left_are_drafted_behind(following: Path) -> None:
    first = request(1, range(40), max_tokens=20)
    answer = play(following, requests=[first])[0][first.request_id].token_ids
    then = request(2, (*range(40), *answer, 3), max_tokens=20, logprobs=5)
    plain, _ = play(following, requests=[first], later=[then])
    asks = '{"method": "mtp"}'
    found, counters = play(following, Speculation("mtp", 4), [first], later=[then], speculative_config=asks)
    assert told(found) == told(plain)
    assert counters.prefix_hit_tokens >= 48
    assert counters.accepted_tokens == counters.draft_tokens > 25


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads_draft_as_they_are_asked(eagle3: tuple[Path, str], following: Path, method: str) -> None:
    """The engine's own switch, with steps timed at the start."""
    folder, asks = eagle3 if method == "eagle3" else (following, '{"method": "mtp"}')
    requests = [request(number, [number, 7, 9], max_tokens=60) for number in range(2)]
    plain, _ = play(folder, requests=requests)
    found, counters = play(folder, requests=requests, speculative_config=asks)
    assert told(found) == told(plain)
    assert (counters.accepted_tokens > 0) or method == "eagle3"


def loaded(folder: Path, asks: str) -> LoadedEngine:
    config = WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=64),
        ServiceConfig("-"),
        CacheConfig(page_size=16, kv_cache_bytes=2**22),
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, speculative_config=asks),
    )
    found = load_engine(config, op_set("cpu", 1), LocalCollectives())
    found.core.draft_with(Speculation("mtp", 4), drafter=DrafterFacts(64, follows=True))
    return found


def test_weights_of_a_head_go_and_come_back(following: Path) -> None:
    engine, one, answers = loaded(following, '{"method": "mtp"}'), request(1, [7, 9], max_tokens=30), []
    assert engine.draft_model is not None
    held = engine.draft_model.weights["eh_proj.weight"]
    for number in range(2):
        collected = engine.core.on_outputs = Collected()
        engine.core.submit(copy.deepcopy(one))
        step_until_idle(engine.core)
        answers.append(collected.outputs[one.request_id].token_ids)
        if number == 0:
            engine.weights.unload()
            assert not held.any()
            engine.weights.reload(lambda: None)
            engine.core._planner.invalidate(2)
    counters = engine.core._planner.scheduler.counters
    assert answers[0] == answers[1]
    assert counters.accepted_tokens == counters.draft_tokens > 40


def test_another_head_in_the_place_of_one_is_not_read(eagle3: tuple[Path, str], tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(json.loads(eagle3[1])["model"], head)
    engine = loaded(eagle3[0], json.dumps({"method": "eagle3", "model": str(head)}))
    save_eagle3(head, VOCAB, 80)
    with pytest.raises(CheckpointError, match=r"the head that drafts .* another one lies here now"):
        engine.weights.reload(lambda: None)


def test_weights_of_a_head_come_back_from_a_file_with_other_names(eagle3: tuple[Path, str], tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(json.loads(eagle3[1])["model"], head)
    engine = loaded(eagle3[0], json.dumps({"method": "eagle3", "model": str(head)}))
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"norm.weight": 2 * tensors["norm.weight"]}, head / "model.safetensors")
    engine.weights.reload(lambda: None)
    assert engine.draft_model is not None
    assert torch.equal(engine.draft_model.weights["norm.weight"], 2 * tensors["norm.weight"])


def test_a_head_with_a_copy_of_the_embedding_outlives_its_targets_weights(
    eagle3: tuple[Path, str], tmp_path: Path
) -> None:
    model, head = tmp_path / "model", tmp_path / "head"
    shutil.copytree(eagle3[0], model)
    shutil.copytree(json.loads(eagle3[1])["model"], head)
    whole, own = (load_file(folder / "model.safetensors") for folder in (model, head))
    save_file(own | {"embed_tokens.weight": whole["model.embed_tokens.weight"].clone()}, head / "model.safetensors")
    engine = loaded(model, json.dumps({"method": "eagle3", "model": str(head)}))
    changed = {name: 2 * tensor for name, tensor in whole.items()}
    save_file(changed, model / "model.safetensors")
    engine.weights.reload(lambda: None)
    assert torch.equal(engine.model.weights["norm.weight"], changed["model.norm.weight"])
    assert engine.draft_model is not None
    assert torch.equal(engine.draft_model.weights["norm.weight"], own["norm.weight"])


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ({"method": "mtp"}, "method is mtp, but .* has no layer for multi-token prediction"),
        ({"method": "eagle3", "model": "/nowhere"}, "/nowhere"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2, must be the model's 1 rank"),
        ({"quantization": "fp3"}, r"the head that drafts \(speculative_config\): quantization 'fp3' is not known"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_cannot_be_had_is_refused_by_name(eagle3: tuple[Path, str], asks: dict[str, str], message: str) -> None:
    folder, head = eagle3
    asked = asks if "method" in asks else json.loads(head) | asks
    with pytest.raises((ConfigError, CheckpointError, ModelNotFound), match=message):
        loaded(folder, json.dumps(asked))
