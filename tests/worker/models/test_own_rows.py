"""Data-parallel attention: each rank has whole attention weights and computes the rows of prompts of its own. Logits
are those of transformers on one to four ranks, and the same bits whatever the other prompts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import load_model, prepare
from support.threads import ThreadWorld
from support.tiny_models import logits_on_ranks, prefill, prompt, reference_logits, relative_error, save_tiny

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 80,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
HEADS: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT | {"n_group": 4, "topk_group": 2, "attention_bias": True},
    "glm4_moe_lite": LATENT | {"num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 24},
    "minimax_m2": HEADS | {"intermediate_size": 48},  # a norm of all heads, which ranks else make together
    "gpt_oss": HEADS | {"sliding_window": 8},  # sinks, biases, two cache groups
}
TINY = "llama"
"""No mixture: 9 query heads read 3 KV heads, and q, k, v and o have biases."""
PROMPTS = [prompt(70, 97), prompt(19, 97, 1), prompt(33, 97, 2)]
WORLDS = {1: (0, 0, 0), 2: (1, 0, 1), 3: (2, 2, 1), 4: (3, 0, 3)}
"""The ranks that attend for the prompts; of three and four ranks one or two only take part in the rest."""


def save(folder: Path, name: str) -> Any:
    """A random model none of whose norms and biases is without effect."""
    if name == TINY:
        return save_tiny(folder, name, vocab_size=97)
    torch.manual_seed(5)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(name, **SIZES | CONFIGS[name]), attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
    model.eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", [*CONFIGS, TINY])
def test_logits_are_those_of_transformers_whichever_rank_attends(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name)
    expected = [reference_logits(model, ids) for ids in PROMPTS]
    for ranks, owners in WORLDS.items():
        whole = {"enable_expert_parallel": True} if ranks == 2 and name != TINY else {}
        backend = "reference" if ranks == 3 else "cpu"
        found = logits_on_ranks(tmp_path, ranks, PROMPTS, 33, backend, owners=owners, **whole)
        for ids in range(len(PROMPTS)):
            error = relative_error(found[ids], expected[ids])
            assert error < 1e-4, f"prompt {ids} on {ranks} ranks, attended for by rank {owners[ids]}"


@pytest.mark.parametrize("name", ["deepseek_v2", TINY])
def test_a_prompt_gets_the_same_bits_in_chunks_among_others_and_on_any_rank(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    (alone,) = logits_on_ranks(tmp_path, 3, PROMPTS[:1], backend="cpu", owners=(0,))
    for owners, chunk in (((0, 0, 0), 7), ((1, 1, 0), 1024), ((2, 0, 1), 64)):
        found = logits_on_ranks(tmp_path, 3, PROMPTS, chunk, "cpu", owners=owners)[0]
        assert torch.equal(found, alone), f"owners {owners}, chunks of {chunk}"


def test_ranks_hold_all_heads_and_slices_of_everything_else(tmp_path: Path) -> None:
    save(tmp_path, "deepseek_v2")
    settings = ModelConfig(str(tmp_path), "tiny", data_parallel_attention=True)
    whole = prepare(settings, CacheConfig(), 0, 1).holding
    for rank in range(2):
        holding = prepare(settings, CacheConfig(), rank, 2).holding
        for piece in holding.pieces:
            held = sum(tensor.num_bytes for tensor in holding.tensors(piece).values())
            every = sum(tensor.num_bytes for tensor in whole.tensors(piece).values())
            is_shared_out = any(part in piece.name for part in ("gate_up", "down", "embedding", "lm_head"))
            assert (held < every) == is_shared_out, piece.name


def test_more_ranks_than_heads_can_attend_for_prompts_of_their_own(tmp_path: Path) -> None:
    model = save(tmp_path, "deepseek_v2")
    found = logits_on_ranks(tmp_path, 5, PROMPTS, backend="cpu", owners=(4, 2, 0))
    assert relative_error(found[0], reference_logits(model, PROMPTS[0])) < 1e-4


def test_a_profile_has_the_ops_of_ranks_with_rows_of_their_own_alone(tmp_path: Path) -> None:
    save(tmp_path, "deepseek_v2")
    world = ThreadWorld(2)

    def counted(rank: int) -> set[str]:
        settings = ModelConfig(str(tmp_path), "tiny", data_parallel_attention=True)
        model = load_model(settings, world.collectives[rank], op_set("cpu"), 70, 70, cache=CacheConfig(page_size=16))
        model.start_profile()
        prefill(model, PROMPTS[:1], 70, owners=(1,))
        return {profile.op for profile in model.profile()}

    idle, busy = world.run(counted)
    assert busy - idle >= {"latent_append", "latent_attention"}
    assert {"embedding", "all_reduce"} <= idle
