"""Qwen3 dense: q and k are normalised head by head, and the head size is its own number."""

from __future__ import annotations

from allspan.worker.load.foreign import ForeignConfig
from allspan.worker.models.families.common import Family, Features, dense_spec
from allspan.worker.models.families.qwen2 import qwen_window
from allspan.worker.models.spec import ModelSpec


def _read(config: ForeignConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    features = Features(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_dim=128,
        max_position_embeddings=32768,
        sliding_window=qwen_window(config),
    )
    return dense_spec(config, "qwen3", features)


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read, gguf_architectures=("qwen3",))
