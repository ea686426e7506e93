"""ModelSpec: a family is data. A foreign config is read once, in its family's file; from then on these values count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary embedding. `kind` is "default", "llama3", "yarn" or "linear"; the rest are that kind's parameters
    (Hugging Face names)."""

    theta: float
    kind: str = "default"
    rotary_dim: int = 0
    """Elements of a head that turn; 0: all."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    """YaRN's scale of cos and sin; 0: 0.1 · ln(factor) + 1."""
    truncate: bool = True
    """YaRN: whether the ends of the ramp are rounded outwards to whole elements."""
    freq_factors: tuple[float, ...] = ()
    """Divisors of the inverse frequencies, one a pair of elements (how GGUF files carry llama3 scaling)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder asks of a model. Sizes are of the whole model, not of a rank."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rotary: RotarySpec
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on the attention output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    """Of the checkpoint: "float32", "bfloat16" or "float16"."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Of config.json or the GGUF header; generation_config.json may add some (`protos/text/model_defaults.py`)."""
    notes: tuple[str, ...] = ()
    """What the user should hear about this reading of the model, such as a context cut to the sliding window."""
