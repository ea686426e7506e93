"""GGUF metadata under Hugging Face's names, so that a family reads one kind of config."""

from __future__ import annotations

from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.config_values import GGUF_NAMES
from allspan.protos.model_files.json_values import shown
from allspan.worker.weights.gguf_file import GgufFile

_REFUSED = (
    "expert_count",
    "attention.clamp_kqv",
    "attention.scale",
    "attention.logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)
"""Keys that change the computation and that the dense decoder does not know; 0 means absent."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_values(file: GgufFile, model_type: str, source: str) -> dict[str, Any]:
    """Raises CheckpointError for metadata that asks for more than the decoder computes."""
    metadata = file.metadata
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in _REFUSED:
        if own.get(key):
            raise CheckpointError(f"{source}: {prefix}{key} = {shown(own[key])} is not supported")
    names = file.names()
    values: dict[str, Any] = {theirs: own[ours] for ours, theirs in GGUF_NAMES.items() if ours in own}
    values["model_type"] = model_type
    values["tie_word_embeddings"] = "output.weight" not in names
    values["attention_bias"] = "blk.0.attn_q.bias" in names
    values["mlp_bias"] = "blk.0.ffn_up.bias" in names
    values["use_sliding_window"] = bool(own.get("attention.sliding_window"))
    values["gguf_sliding_window"] = own.get("attention.sliding_window", 0)
    values["max_window_layers"] = 0
    values["dtype"] = file.dtype()
    if "token_embd.weight" in names:
        values["vocab_size"] = file.shape("token_embd.weight")[0]
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    ends = [metadata[f"tokenizer.ggml.{key}"] for key in _ENDS if f"tokenizer.ggml.{key}" in metadata]
    values["eos_token_id"] = ends
    _check_heads(own, values, prefix, source)
    values["rope_scaling"] = _rope_scaling(own, prefix, source)
    if "rope_freqs.weight" in names:
        values["rope_freq_factors"] = file.read_all("rope_freqs.weight")
    return values


def _check_heads(own: dict[str, Any], values: dict[str, Any], prefix: str, source: str) -> None:
    """Equal heads in all layers, keys as wide as values, and rotary over the whole head."""
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(own.get(key), list):
            raise CheckpointError(f"{source}: {prefix}{key} that differs from layer to layer is not supported")
    heads, hidden, head_dim = (values.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        values["head_dim"] = head_dim = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{source}: {prefix}{key} = {shown(own[key])} is not supported (head size {head_dim})"
            )


def _rope_scaling(own: dict[str, Any], prefix: str, source: str) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    names = {
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    scaling.update({theirs: own[ours] for ours, theirs in names.items() if ours in own})
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        value = own.get(f"rope.scaling.{key}")
        neutral = (None, 0.0) if key == "yarn_log_multiplier" else (None, 1.0)
        if value not in neutral:
            raise CheckpointError(f"{source}: {prefix}rope.scaling.{key} = {shown(value)} is not supported")
    return scaling
