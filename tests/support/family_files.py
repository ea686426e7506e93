"""GGUF files of the tiny models of every family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from support.family_rows import CHOICE_BIAS, FamilyRow
from support.tiny_gguf import permuted

_NONE: Mapping[str, np.ndarray] = {}


def save_family_gguf(path: Path, model: Any, row: FamilyRow, mxfp4: Mapping[str, np.ndarray] = _NONE) -> None:
    """Writes the model in float32 under the names that the `gguf` package has for its architecture; `mxfp4` has the
    blocks of tensors that are of that type."""
    config, kind = model.config, next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == row.gguf)
    writer = gguf.GGUFWriter(path, row.gguf)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"] if "rope_theta" in rope else rope["full_attention"]["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = {"attention.key_length": head, "attention.value_length": head, **row.metadata}
    writer.add_token_list([f"token{i}" for i in range(2000)])
    writer.add_eos_token_id(2)
    for key, value in own.items():
        _add(writer, f"{row.gguf}.{key}", value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(CHOICE_BIAS)}
    for name, buffer in biases.items():
        writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
    parts = (_parts(name, parameter.detach().numpy(), model, row) for name, parameter in model.named_parameters())
    for name, values in ((name, values) for each in parts for name, values in each.items()):
        role = name.split(".")[-2]
        stored = permuted(values, heads[role]) if row.is_permuted and role in heads else values
        foreign = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert foreign is not None, name
        stored = stored + np.float32(row.norm_offset) if "norm" in name else stored
        stored = stored[0] if "ffn_gate_inp_shexp" in foreign else stored  # llama.cpp's converter drops such dimensions
        if foreign in mxfp4:
            writer.add_tensor(foreign, mxfp4[foreign], raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(foreign, np.ascontiguousarray(stored))
    for name, floats in row.tensors.items():
        writer.add_tensor(name, np.array(floats, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _parts(name: str, values: np.ndarray, model: Any, row: FamilyRow) -> dict[str, np.ndarray]:
    """Experts' tensors as converters have them: gate and up apart."""
    if row.model_type == "gpt_oss":
        return _gpt_oss_parts(name, values)
    if row.key_rows and "kv_b_proj" in name:
        heads = values.reshape(model.config.num_attention_heads, -1, values.shape[1])
        keys, held = heads[:, : row.key_rows].swapaxes(1, 2), heads[:, row.key_rows :]
        if row.is_flat:
            keys, held = keys.reshape(-1, keys.shape[2]), held.reshape(-1, held.shape[2])
        return {name.replace("kv_b", "k_b"): keys, name.replace("kv_b", "v_b"): held}
    if not name.endswith("experts.gate_up_proj"):
        return {name + (".weight" if name.endswith("experts.down_proj") else ""): values}
    gate, up = np.split(values, 2, axis=1)
    return {name.replace("gate_up", "gate") + ".weight": gate, name.replace("gate_up", "up") + ".weight": up}


def _gpt_oss_parts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Matrices of its experts are transposed, and rows of gate and up come in turn."""
    if name.endswith("sinks"):
        return {f"{name}.weight": values}
    if ".experts." not in name:
        return {name: values}
    stem, suffix = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    values = values.swapaxes(1, 2) if suffix == "weight" else values
    if not stem.endswith("gate_up_proj"):
        return {f"{stem}.{suffix}": values}
    return {f"{stem.replace('gate_up', each)}.{suffix}": values[:, i::2] for i, each in enumerate(("gate", "up"))}
