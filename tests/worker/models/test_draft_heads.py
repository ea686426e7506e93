"""Draft heads against plain float32: rows of their target's features, then rows of their own drafts, in chunks, on one
to three ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.backend.table import open_backend
from allspan.worker.cache.kv import KVCache
from allspan.worker.load.draft_heads import PreparedHead, load_head, prepare_eagle3, prepare_mtp
from allspan.worker.load.loader import Prepared, load_model
from allspan.worker.models.model import Model
from allspan.worker.step.buffer_sizes import ModelLimits
from support.draft_heads import Mtp, eagle3_rows, save_eagle3
from support.quantised_checkpoints import FORMS, quantise_folder
from support.threads import ThreadWorld
from support.tiny_models import prompt, relative_error, save_tiny, step_inputs

PAGE, CHUNK = 8, 7
IDS, DRAFTS = prompt(20, 97), [4, 90]
FOLLOWING = [*IDS[1:], 55, *DRAFTS]
Prepare = Callable[[ModelConfig, Prepared], PreparedHead]


def load(
    path: Path, prepare: Prepare, world: ThreadWorld, rank: int, backend: str = "auto", **settings: Any
) -> tuple[Model, Model, PreparedHead]:
    config, ops, found = ModelConfig(str(path), "tiny", **settings), op_set(backend), []
    target = load_model(
        config,
        world.collectives[rank],
        ops,
        32,
        32,
        cache=CacheConfig(page_size=PAGE),
        check_room=lambda prepared: found.append(prepare(config, prepared)),
    )
    head = found[0]
    target.keep_features(head.spec.features)
    limits = ModelLimits(32, 32, target.max_model_len)
    model = load_head(head, target, limits, ops, world.collectives[rank], open_backend("cpu"))
    for each in (target, model):
        each.bind_cache(*(KVCache(group.spec, 4) for group in each.cache_groups))
    return target, model, head


def rows_on_rank(target: Model, head: Model) -> tuple[Tensor, Tensor]:
    """This rank's columns of the head's logits [n, ids], and the states that the next rows read."""
    rows: list[tuple[Tensor, Tensor]] = []

    def step(features: Tensor, is_chained: bool) -> None:
        first = sum(len(logits) for logits, _ in rows)
        inputs = step_inputs([FOLLOWING[first : first + len(features)]], [first], [[2, 0, 3]], PAGE)
        logits = head.forward(replace(inputs, features=features, is_chained=is_chained))
        rows.append((logits.clone(), head.chained(len(features)).clone()))

    for start in range(0, len(IDS), CHUNK):
        ids = IDS[start : start + CHUNK]
        target.forward(step_inputs([ids], [start], [[1, 2, 0]], PAGE))
        step(target.features(len(ids)), is_chained=False)
    for _ in DRAFTS:
        step(rows[-1][1][-1:], is_chained=True)
    logits, states = zip(*rows, strict=True)
    return torch.cat(logits), torch.cat(states)


def assert_rows(
    path: Path, prepare: Prepare, expected: tuple[Tensor, Tensor], limit: float = 1e-4, **settings: Any
) -> None:
    for size in (1, 2, 3):
        world = ThreadWorld(size)

        def run(rank: int, world: ThreadWorld = world) -> tuple[Tensor, Tensor]:
            target, head, _ = load(path, prepare, world, rank, **settings)
            return rows_on_rank(target, head)

        logits, states = zip(*world.run(run), strict=True)
        assert relative_error(torch.cat(logits, dim=1), expected[0]) < limit, f"{size} ranks"
        assert all(relative_error(each, expected[1]) < limit for each in states)


def states_of(reference: Any, layers: list[int]) -> Tensor:
    with torch.no_grad():
        states = reference(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0].float() for layer in layers], dim=1)


SPECULATORS = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, [2, 3, 3]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5], "use_aux_hidden_state": True}}, [0, 1, 5]),
        (SPECULATORS | {"norm_before_residual": True}, [1, 3, 4]),
        (SPECULATORS | {"norm_before_residual": False, "norm_before_fc": True, "norm_output": True}, [1, 3, 4]),
        ({"width": 42, "target_hidden_size": 60}, [2, 3, 3]),
    ],
    ids=["authors", "nvidia", "speculators", "speculators, all norms", "of another width"],
)
def test_an_eagle3_head_computes_what_its_formulas_say(
    config: dict[str, Any], layers: list[int], tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path / "target", "qwen2", num_hidden_layers=6, hidden_size=60)
    state = save_eagle3(tmp_path / "head", 97, 40, **config)
    embedding = state.get("embed_tokens.weight", reference.model.embed_tokens.weight.detach())
    is_nested = "speculators_model_type" in config
    expected = eagle3_rows(
        state,
        embedding[FOLLOWING],
        states_of(reference, layers),
        len(DRAFTS),
        config.get("norm_before_residual", is_nested),
        config.get("norm_output", False),
    )
    assert_rows(
        tmp_path / "target", lambda model, target: prepare_eagle3(str(tmp_path / "head"), model, target), expected
    )


DEEPSEEK = {
    "hidden_size": 64,
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
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
GLM = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(("family", "config"), [("deepseek_v3", DEEPSEEK), ("glm4_moe", GLM)])
def test_a_layer_for_multi_token_prediction_computes_what_its_targets_layer_does(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    mtp = Mtp(tmp_path, family, **config)
    features = states_of(mtp.target, [2])
    expected = mtp.rows(mtp.target.model.embed_tokens.weight.detach()[FOLLOWING], features, len(DRAFTS))
    assert_rows(tmp_path, prepare_mtp, expected)
    assert_rows(tmp_path, prepare_mtp, expected, enable_expert_parallel=True)


def test_a_layer_for_multi_token_prediction_is_held_as_the_checkpoint_is_quantised(tmp_path: Path) -> None:
    mtp = Mtp(tmp_path / "model", "deepseek_v3", **DEEPSEEK)
    make, described = FORMS["fp8-blocks"]
    mtp.take(
        tmp_path,
        quantise_folder(tmp_path / "model", make, described, (".gate.", "eh_proj", "embed_tokens", "shared_head")),
    )
    expected = mtp.rows(
        mtp.target.model.embed_tokens.weight.detach()[FOLLOWING], states_of(mtp.target, [2]), len(DRAFTS)
    )
    assert_rows(tmp_path / "model", prepare_mtp, expected, 0.01, dtype="float32")
