"""What the configs of most decoders have in common, read once into a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspan.protos.model_files.config_values import size_of
from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.limits import CONFIG_SIZES
from allspan.worker.models.blocks.base import MlpBlock
from allspan.worker.models.blocks.gated_mlp import GatedMlp
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.families.foreign_config import ForeignConfig
from allspan.worker.models.rope import KINDS, RotarySpec, yarn_scale
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms, NormSpec
from allspan.worker.step.row_inputs import POSITION_AXES
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


def model_spec(
    config: ForeignConfig, family: str, layers: Sequence[LayerSpec], context: int, norm: NormSpec | None = None
) -> ModelSpec:
    """What every decoder's config says beside its layers. `norm` is the last one, by default as `read_norm` has it."""
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


def alike(config: ForeignConfig, attention: Gqa, mlp: MlpBlock, windows: Sequence[int] = ()) -> list[LayerSpec]:
    """`num_hidden_layers` layers whose blocks have a norm before them, and which differ in nothing but their `windows`
    (0: the layer sees all tokens; none given: all layers do)."""
    norms = Norms(read_norm(config))
    kinds = {window: LayerSpec(replace(attention, window=window), mlp, norms, norms) for window in {0, *windows}}
    return [kinds[window] for window in windows or [0] * config.size("num_hidden_layers")]


def read_norm(config: ForeignConfig) -> NormSpec:
    return NormSpec(config.number("rms_norm_eps", 1e-6))


def read_gqa(config: ForeignConfig, rotary: RotarySpec | None, head_dim: int = 0, **features: Any) -> Gqa:
    """Heads and their size, which is `head_dim` when the config gives none (0: hidden size / heads); `features` are
    further fields of `Gqa`."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    if not config.get("head_dim") and not head_dim and hidden_size % num_heads:
        raise config.error(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    size = config.size("head_dim", head_dim or hidden_size // num_heads)
    turned = size if rotary is None else rotary.rotary_dim or size
    if turned % 2 or turned > size:
        named = f"head size {size}" if turned == size else f"rotary dimension {turned} of a head of {size}"
        raise config.error(f"{named} is odd: rotary embedding turns pairs of elements")
    if rotary is not None and len(rotary.freq_factors) not in (0, turned // 2):
        raise config.error(f"{len(rotary.freq_factors)} rope frequency factors for a head size of {size}")
    if rotary is not None and len(rotary.axes) not in (0, turned // 2):
        pairs = turned // 2
        raise config.error(f"mrope_section has {len(rotary.axes)} pairs of elements, a head of {size} turns {pairs}")
    return Gqa(num_heads, num_kv_heads, size, rotary, **features)


def read_gated_mlp(config: ForeignConfig, bias: bool = False) -> GatedMlp:
    """Raises CheckpointError for another activation than the kernels have."""
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.error(f"hidden_act {shown(activation)} is not supported (supported: silu)")
    return GatedMlp(config.size("intermediate_size"), bias)


def read_context(config: ForeignConfig, rotary: RotarySpec, default: int) -> int:
    """The most tokens of a request (`default` where the config gives none)."""
    tokens = config.size("max_position_embeddings", default)
    if rotary.kind == "yarn":
        tokens = max(tokens, int(rotary.factor * rotary.original_max_position_embeddings))
    return size_of("max_position_embeddings", tokens, config.source)


def same_window(config: ForeignConfig, context: int, window: int) -> list[int]:
    """The same window for each layer, 0 where a layer sees the whole context anyway."""
    return [window if window < context else 0] * config.size("num_hidden_layers")


def read_windows(config: ForeignConfig, context: int, window: int, first: int = 0) -> list[int]:
    """The window of each layer, 0 where it sees all tokens, as it does with a window of the whole context.
    `layer_types`, where given, says which layers have the window; else all from layer `first` on."""
    windows, kinds = same_window(config, context, window), config.get("layer_types")
    if kinds is None:
        return [each if layer >= first else 0 for layer, each in enumerate(windows)]
    if not isinstance(kinds, list) or len(kinds) != len(windows):
        raise config.error(
            f"layer_types must be a list of num_hidden_layers ({len(windows)}) names, got {shown(kinds)}"
        )
    known = ("full_attention", "sliding_attention")
    if unknown := sorted({str(kind) for kind in kinds} - {*known}):
        raise config.error(f"layer_types {shown(unknown[0])} is not supported (supported: {', '.join(known)})")
    return [each if kind == "sliding_attention" else 0 for each, kind in zip(windows, kinds, strict=True)]


def read_rotary(config: ForeignConfig, default_context: int, rotary_dim: int = 0, layer_kind: str = "") -> RotarySpec:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5), which goes first.
    `rotary_dim`: of a family that turns only so many elements of a head; `layer_kind`: of one whose kinds of layers
    ("full_attention", "sliding_attention") have tables of their own."""
    scaling = config.section("rope_scaling") or config.section("rope_parameters") or ForeignConfig({}, config.source)
    if layer_kind:
        scaling = scaling.section(layer_kind) or ForeignConfig({}, config.source)
    if any(isinstance(scaling.get(key), dict) for key in ("full_attention", "sliding_attention")):
        raise scaling.error("a rotary embedding of its own for each kind of layer is not supported")
    partial = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0 and not rotary_dim:
        raise config.error(f"partial_rotary_factor {partial} is not supported (supported: 1.0)")
    kind, axes = scaling.text("rope_type", scaling.text("type", "default")), _read_axes(scaling)
    if kind == "mrope":
        kind = "default"
    if kind not in KINDS:
        raise config.error(f"rope type {shown(kind)} is not supported (supported: {', '.join(KINDS)})")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    freq_factors = tuple(config.get("rope_freq_factors") or ())
    if kind == "default":
        return RotarySpec(theta=theta, rotary_dim=rotary_dim, freq_factors=freq_factors, axes=axes)
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
        rotary_dim=rotary_dim,
        factor=factor,
        low_freq_factor=scaling.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=scaling.number("high_freq_factor", None if kind == "llama3" else 4.0),
        original_max_position_embeddings=own,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 0.0,
        truncate=scaling.flag("truncate", True),
        freq_factors=freq_factors,
        axes=axes,
    )


def _read_axes(scaling: ForeignConfig) -> tuple[int, ...]:
    """Which of a token's positions turns each pair: `mrope_section` has the pairs of each axis, one axis behind the
    other or, with `mrope_interleaved`, in turn."""
    sections = scaling.get("mrope_section")
    if sections is None:
        return ()
    most = CONFIG_SIZES["head_dim"]
    is_whole = isinstance(sections, list) and all(type(count) is int and 0 <= count <= most for count in sections)
    if not is_whole or len(sections) != len(POSITION_AXES):
        raise scaling.error(
            f"mrope_section must be {len(POSITION_AXES)} numbers of pairs, got {shown(sections)} (each at most {most})"
        )
    if not scaling.flag("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    count = len(sections)
    return tuple(pair % count if pair < count * sections[pair % count] else 0 for pair in range(sum(sections)))


def _attention_factor(scaling: ForeignConfig, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_scale(factor, scaling.number("mscale")) / yarn_scale(factor, scaling.number("mscale_all_dim"))
    return yarn_scale(factor)


def _read_dtype(config: ForeignConfig) -> str:
    name = (config.text("dtype") or config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise config.error(f"dtype {shown(name)} is not supported (supported: float32, bfloat16, float16)")
    return _DTYPES[name]
