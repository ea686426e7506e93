"""What the configs of all dense decoders share, read once into a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from allspan.worker.load.foreign import ForeignConfig
from allspan.worker.models.rope import KINDS, yarn_scale
from allspan.worker.models.spec import ModelSpec, RotarySpec
from allspan.worker.weights.weight_map import DENSE, WeightMap

_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the registry. `read` turns a config of one of the `model_types` into a spec."""

    model_type: str
    architecture: str
    read: Callable[[ForeignConfig], ModelSpec]
    gguf_architectures: tuple[str, ...] = ()
    weights: WeightMap = DENSE


@dataclass(frozen=True, slots=True)
class Features:
    """In what a dense family differs from plain Llama."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int = 0
    """When the config gives none; 0: hidden size / heads."""
    max_position_embeddings: int = 2048
    """When the config gives none."""
    sliding_window: int = 0
    """Tokens that a layer sees back; 0: all."""


def dense_spec(config: ForeignConfig, family: str, features: Features) -> ModelSpec:
    """Raises CheckpointError naming the file and the key for anything that the decoder would not compute exactly."""
    _refuse_unsupported(config)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    if not config.get("head_dim") and not features.head_dim and hidden_size % num_heads:
        raise config.error(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_dim = config.size("head_dim", features.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error(f"head size {head_dim} is odd: rotary embedding turns pairs of elements")
    rotary = read_rotary(config, features.max_position_embeddings)
    if len(rotary.freq_factors) not in (0, head_dim // 2):
        raise config.error(f"{len(rotary.freq_factors)} rope frequency factors for a head size of {head_dim}")
    context = config.size("max_position_embeddings", features.max_position_embeddings)
    if rotary.kind == "yarn":
        context = max(context, int(rotary.factor * rotary.original_max_position_embeddings))
    notes: tuple[str, ...] = ()
    if 0 < features.sliding_window < context:
        notes = (
            f"context cut from {context} to {features.sliding_window} tokens: the model's sliding-window attention "
            "beyond that is not supported",
        )
        context = features.sliding_window
    bos = config.token_ids("bos_token_id")
    return ModelSpec(
        family=family,
        hidden_size=hidden_size,
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=context,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rotary=rotary,
        qkv_bias=features.qkv_bias,
        output_bias=features.output_bias,
        mlp_bias=features.mlp_bias,
        qk_norm=features.qk_norm,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        dtype=_read_dtype(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(config.token_ids("eos_token_id"))),
        notes=notes,
    )


def sliding_window(config: ForeignConfig, window: int) -> int:
    """`window` if any layer attends through it, else 0. `layer_types`, where given, says which layers do."""
    layers = config.get("layer_types")
    if layers is None:
        return window
    if not isinstance(layers, list):
        raise config.error(f"layer_types must be a list, got {layers!r}")
    unknown = sorted({str(kind) for kind in layers} - {"full_attention", "sliding_attention"})
    if unknown:
        raise config.error(f"layer_types {unknown[0]!r} is not supported (supported: full_attention)")
    return window if "sliding_attention" in layers else 0


def read_rotary(config: ForeignConfig, default_context: int) -> RotarySpec:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5), which goes first."""
    scaling = config.section("rope_scaling") or config.section("rope_parameters") or ForeignConfig({}, config.source)
    if any(isinstance(scaling.get(key), dict) for key in ("full_attention", "sliding_attention")):
        raise scaling.error("a rotary embedding of its own for each kind of layer is not supported")
    partial = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise config.error(f"partial_rotary_factor {partial} is not supported (supported: 1.0)")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in KINDS:
        raise config.error(f"rope type {kind!r} is not supported (supported: {', '.join(KINDS)})")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    freq_factors = tuple(config.get("rope_freq_factors") or ())
    if kind == "default":
        return RotarySpec(theta=theta, freq_factors=freq_factors)
    own = config.size("original_max_position_embeddings", config.size("max_position_embeddings", default_context))
    if config.get("original_max_position_embeddings") is None:
        own = scaling.size("original_max_position_embeddings", own)
    if kind == "yarn" and scaling.get("factor") is None:
        factor = config.size("max_position_embeddings", default_context) / own
    else:
        factor = scaling.number("factor")
    return RotarySpec(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=scaling.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=scaling.number("high_freq_factor", None if kind == "llama3" else 4.0),
        original_max_position_embeddings=own,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 0.0,
        truncate=scaling.flag("truncate", True),
        freq_factors=freq_factors,
    )


def _attention_factor(scaling: ForeignConfig, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_scale(factor, scaling.number("mscale")) / yarn_scale(factor, scaling.number("mscale_all_dim"))
    return yarn_scale(factor)


def _refuse_unsupported(config: ForeignConfig) -> None:
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.error(f"hidden_act {activation!r} is not supported (supported: silu)")


def _read_dtype(config: ForeignConfig) -> str:
    name = (config.text("dtype") or config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise config.error(f"dtype {name!r} is not supported (supported: float32, bfloat16, float16)")
    return _DTYPES[name]
