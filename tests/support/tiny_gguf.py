"""GGUF files written from tiny transformers checkpoints, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from support.gguf_blocks import random_blocks

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{suffix}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """How q and k lie in "llama" files: the two halves of a head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _blocks_of(values: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """The values quantised, or, of types that the `gguf` package only reads, random blocks of their magnitude."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind, *values.shape, float(np.abs(values).mean()), seed)


def save_gguf(
    path: Path, model: Any, kind: Type, metadata: dict[str, Any] | None = None, kinds: dict[str, Type] | None = None
) -> None:
    """Writes the model with its matrices as `kind`, but for those that `kinds` names ("ffn_up"), and puts the decoded
    values back into `model`."""
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_token_list([f"token{i}" for i in range(2000)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for key, value in (metadata or {}).items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied, names = config.tie_word_embeddings, list[str]()
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight" and tied:
            continue
        values = parameter.detach().numpy()
        matrix = (kinds or {}).get(gguf_name(name).split(".")[-2], kind)
        stored_as = matrix if values.ndim == 2 else Type.F32
        raw = _blocks_of(values, stored_as, len(names))
        names.append(name)
        decoded = gguf.dequantize(raw, stored_as).reshape(values.shape)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(decoded)))
        role = name.split(".")[-2]
        stored = permuted(raw, heads[role]) if architecture == "llama" and role in heads else raw
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=stored_as)
    for extra, values in getattr(model, "extra_tensors", {}).items():
        writer.add_tensor(extra, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
