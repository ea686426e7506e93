"""GGUF files of mixtures of experts: every type that a file may hold experts in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.worker.quant.gguf import NATIVE
from support.gguf_blocks import random_blocks
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

KINDS = ("F32", "F16", "BF16", *NATIVE, "IQ1_S", "TQ2_0")
"""The last two are decoded, as others that have no kernels."""
EXPERTS, LAYERS = 3, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny() -> Any:
    """Every token goes to all experts, so that rounding moves none to another one."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": LAYERS}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "norm_topk_prob": True}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts, max_position_embeddings=64)
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.1)
    return model.eval()


def blocks_of(values: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """The values quantised, or, of types that the `gguf` package only reads, random blocks of their magnitude."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        rows = random_blocks(kind, values.shape[0] * values.shape[1], values.shape[2], 0.1, seed)
        return rows.reshape(*values.shape[:2], -1)


def save(path: Path, model: Any, kinds: dict[str, Type]) -> None:
    """Writes experts in these types by role, all else as it is, and puts the decoded values back into `model`."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_expert_feed_forward_length(256)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"token{i}" for i in range(97)])
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in TOP:
            writer.add_tensor(f"{TOP[stem]}.weight", tensor.numpy())
            continue
        _, _, layer, role = stem.split(".", 3)
        if role in NAMES:
            writer.add_tensor(f"blk.{layer}.{NAMES[role]}.weight", tensor.numpy())
            continue
        roles = ("gate", "up") if role.endswith("gate_up_proj") else ("down",)
        for part, values in zip(roles, tensor.chunk(len(roles), 1), strict=True):
            raw = blocks_of(values.contiguous().numpy(), kinds[part], len(stem) + int(layer))
            values.copy_(torch.from_numpy(gguf.dequantize(raw, kinds[part]).reshape(values.shape)))
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", raw, raw_dtype=kinds[part])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_every_type_on_ranks_that_split_blocks_or_hold_whole_ones(kind: str, tmp_path: Path) -> None:
    """Gate and down are of one type, up of another, as files of mixed types have them."""
    model, path, ids = tiny(), tmp_path / "model.gguf", prompt(12, 97)
    other = KINDS[KINDS.index(kind) - 1]
    save(path, model, {"gate": Type[kind], "up": Type[other], "down": Type[kind]})
    expected = reference_logits(model, ids)
    one = logits_on_ranks(path, 1, [ids], dtype="float32", backend="cpu")[0]
    assert (one - expected).std() / expected.std() < 0.06
    whole = {"enable_expert_parallel": True}
    assert relative_error(logits_on_ranks(path, 2, [ids], dtype="float32", backend="cpu", **whole)[0], one) < 5e-3
    sliced = logits_on_ranks(path, 3, [ids], dtype="float32", backend="cpu")[0]
    assert (sliced - expected).std() / expected.std() < 0.06
