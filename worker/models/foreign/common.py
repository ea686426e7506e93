"""What the configs of most decoders have in common, read once into a ModelSpec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from allspan.protos.model_files.config_values import size_of
from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.base import MlpBlock
from allspan.worker.models.blocks.gated_mlp import GatedMlp
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.rotary import check_factors
from allspan.worker.models.foreign.windows import FULL, SLIDING
from allspan.worker.models.rope import RotarySpec
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms, NormSpec

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_KINDS = (FULL, SLIDING, "attention")
_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


def model_spec(
    config: ForeignConfig, family: str, layers: Sequence[LayerSpec], context: int, norm: NormSpec | None = None
) -> ModelSpec:
    """What every decoder's config says beside its layers. `norm` is the last one, by default as `read_norm` has it."""
    if not config.flag("is_causal", True) or config.flag("use_bidirectional_attention"):
        raise config.error(
            "attention in both directions (is_causal false, use_bidirectional_attention true) is not supported: use a "
            "model whose tokens see those before them"
        )
    _check_layers(config)
    bos = config.token_ids("bos_token_id")
    return ModelSpec(
        family=family,
        hidden_size=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=context,
        layers=tuple(layers),
        norm=norm or read_norm(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        dtype=_read_dtype(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(config.token_ids("eos_token_id"))),
    )


def _check_layers(config: ForeignConfig) -> None:
    """What is said of layers must be sound also where a family does without it. Raises CheckpointError."""
    is_gguf = config.has("gguf_sliding_window")  # where 0 is no window
    if config.get("sliding_window") is not None and not (is_gguf and config.get("sliding_window") == 0):
        config.size("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or not all(kind in _LAYER_KINDS for kind in kinds):
        known = ", ".join(_LAYER_KINDS)
        raise config.error(f"layer_types must be a list of kinds ({known}), got {shown(kinds)}")


def alike(config: ForeignConfig, attention: Gqa, mlp: MlpBlock, windows: Sequence[int] = ()) -> list[LayerSpec]:
    """`num_hidden_layers` layers whose blocks have a norm before them, and which differ in nothing but their `windows`
    (0: the layer sees all tokens; none given: all layers do)."""
    norms = Norms(read_norm(config))
    kinds = {window: LayerSpec(replace(attention, window=window), mlp, norms, norms) for window in {0, *windows}}
    return [kinds[window] for window in windows or [0] * config.size("num_hidden_layers")]


def read_norm(config: ForeignConfig) -> NormSpec:
    return NormSpec(config.number("rms_norm_eps", 1e-6))


def head_size(config: ForeignConfig, default: int = 0) -> int:
    """The elements of a head; where the config does not say, `default`, or (0) hidden size / heads."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if not config.get("head_dim") and not default and hidden_size % num_heads:
        raise config.error(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    return config.size("head_dim", default or hidden_size // num_heads)


def read_gqa(config: ForeignConfig, rotary: RotarySpec | None, head_dim: int = 0, **features: Any) -> Gqa:
    """Heads and their size, which is `head_dim` when the config gives none (0: hidden size / heads); `features` are
    further fields of `Gqa`."""
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    size = head_size(config, head_dim)
    turned = size if rotary is None else rotary.rotary_dim or size
    if turned % 2 or turned > size:
        named = f"head size {size}" if turned == size else f"rotary dimension {turned} of a head of {size}"
        raise config.error(f"{named} is odd: rotary embedding turns pairs of elements")
    if rotary is not None:
        check_factors(config, rotary, size)
    return Gqa(num_heads, num_kv_heads, size, rotary, **features)


def read_gated_mlp(config: ForeignConfig, bias: bool = False) -> GatedMlp:
    """Raises CheckpointError for another activation than the kernels have."""
    key = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    activation = config.text(key, "silu")
    if activation not in _ACTIVATIONS:
        raise config.error(f"{key} {shown(activation)} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return GatedMlp(config.size("intermediate_size"), bias, _ACTIVATIONS[activation])


def read_context(config: ForeignConfig, rotary: RotarySpec, default: int) -> int:
    """The most tokens of a request (`default` where the config gives none)."""
    tokens = config.size("max_position_embeddings", default)
    if rotary.kind in ("yarn", "linear", "dynamic"):  # one of linear may be 0: it is scaled already
        tokens = max(tokens, int(rotary.factor * rotary.original_max_position_embeddings))
    return size_of("max_position_embeddings", tokens, config.source)


def _read_dtype(config: ForeignConfig) -> str:
    name = (config.text("dtype") or config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise config.error(f"dtype {shown(name)} is not supported (supported: float32, bfloat16, float16)")
    return _DTYPES[name]
