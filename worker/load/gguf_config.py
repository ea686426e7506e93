"""GGUF metadata under Hugging Face's names, so that a family reads one kind of config."""

from __future__ import annotations

from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.config_values import GGUF_NAMES
from allspan.protos.model_files.json_values import shown
from allspan.worker.models.foreign.family import Family
from allspan.worker.weights.gguf_file import GgufFile

_REFUSED = (
    "expert_count",
    "expert_weights_scale",
    "expert_group_scale",
    "experts_per_group",
    "attention.clamp_kqv",
    "attention.scale",
    "attention.temperature_scale",
    "attention.logit_softcapping",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)
"""Keys that change the computation and are refused for families that do not read them (`Family.gguf_keys`); 0 means
absent."""
_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Keys that may have a number for each layer."""
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_values(file: GgufFile, family: Family, source: str) -> dict[str, Any]:
    """Raises CheckpointError for metadata that asks for more than the decoder, or the family, computes."""
    metadata = file.metadata
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in _REFUSED:
        if own.get(key) and key not in family.gguf_keys:
            raise CheckpointError(f"{source}: {prefix}{key} = {shown(own[key])} is not supported")
    if family.has_draft_layers and type(drafting := own.get("nextn_predict_layers", 0)) is int:
        own["block_count"] = own.get("block_count", 0) - drafting
    own = {key: value for key, value in own.items() if value or not key.startswith("expert_") or value is False}
    own = {key: _same(value) if key in _BY_LAYER else value for key, value in own.items()}
    names, keys = file.names(), {**GGUF_NAMES, **family.gguf_keys}
    values: dict[str, Any] = {theirs: own[ours] for ours, theirs in keys.items() if ours in own}
    values = {**family.gguf_values, **values}
    values["model_type"] = family.model_type
    values["tie_word_embeddings"] = "output.weight" not in names
    values["attention_bias"] = bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & {*names})
    values["attention_out_bias"] = "blk.0.attn_output.bias" in names
    values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names
    values["mlp_bias"] = "blk.0.ffn_up.bias" in names
    if not own.get("attention.sliding_window"):
        values["sliding_window"] = None
    values["use_sliding_window"] = bool(own.get("attention.sliding_window"))
    values["gguf_sliding_window"] = own.get("attention.sliding_window", 0)
    values["max_window_layers"] = 0
    values["dtype"] = file.dtype()
    values["is_causal"] = own.get("attention.causal")
    if "token_embd.weight" in names:
        values["vocab_size"] = file.shape("token_embd.weight")[0]
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    ends = [metadata[f"tokenizer.ggml.{key}"] for key in _ENDS if f"tokenizer.ggml.{key}" in metadata]
    values["eos_token_id"] = ends
    if not family.has_latents:
        _check_heads(own, values, prefix, source, family.turns_part)
    values["rope_scaling"] = _rope_scaling(own, prefix, source)
    if {_LONG, _SHORT} <= {*names}:
        values["rope_scaling"] = _longrope(file, own, values)
    if "rope_freqs.weight" in names:
        values["rope_freq_factors"] = file.read_all("rope_freqs.weight")
    return values


def _same(value: Any) -> Any:
    """The number that a list has for every layer; a list of different ones as it is."""
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


def _check_heads(own: dict[str, Any], values: dict[str, Any], prefix: str, source: str, turns_part: bool) -> None:
    """Equal heads in all layers, keys as wide as values, and rotary over the whole head unless `turns_part`."""
    for key in _BY_LAYER:
        if isinstance(own.get(key), list):
            raise CheckpointError(f"{source}: {prefix}{key} that differs from layer to layer is not supported")
    heads, hidden, head_dim = (values.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        values["head_dim"] = head_dim = hidden // heads
    turned = own.get("rope.dimension_count", head_dim)
    if own.get("attention.value_length", head_dim) != head_dim:
        key = "attention.value_length"
    elif turned == head_dim:
        return
    elif turns_part and isinstance(turned, int) and isinstance(head_dim, int) and 0 < turned < head_dim:
        values["partial_rotary_factor"] = (turned + 0.5) / head_dim  # of which a family takes the whole elements
        return
    else:
        key = "rope.dimension_count"
    raise CheckpointError(f"{source}: {prefix}{key} = {shown(own[key])} is not supported (head size {head_dim})")


def _longrope(file: GgufFile, own: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Two lists of factors, which are tensors; the scale of cosines and sines is a number of its own."""
    original = own.get("rope.scaling.original_context_length", values.get("max_position_embeddings"))
    scaling = {
        "rope_type": "longrope",
        "short_factor": file.read_all(_SHORT),
        "long_factor": file.read_all(_LONG),
        "original_max_position_embeddings": original,
    }
    factor = own.get("rope.scaling.attn_factor")
    return scaling | ({"attention_factor": factor} if factor else {})


def _rope_scaling(own: dict[str, Any], prefix: str, source: str) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if kind in ("none", "longrope") or (kind == "linear" and factor in (0.0, 1.0)):
        return None  # longrope is in tensors
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    names = {
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    scaling.update({theirs: own[ours] for ours, theirs in names.items() if ours in own})
    if multiplier := own.get("rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        value = own.get(f"rope.scaling.{key}")
        if value not in (None, 1.0):
            raise CheckpointError(f"{source}: {prefix}rope.scaling.{key} = {shown(value)} is not supported")
    return scaling
