"""Rotary embeddings as configs describe them."""

from __future__ import annotations

import math

from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.limits import CONFIG_SIZES
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.windows import FULL, SLIDING
from allspan.worker.models.rope import KINDS, RotarySpec, yarn_scale
from allspan.worker.step.row_inputs import POSITION_AXES

_OTHER_NAMES = {"mrope": "default", "su": "longrope"}


def read_rotary(config: ForeignConfig, default_context: int, head_dim: int = 0, layer_kind: str = "") -> RotarySpec:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5), which goes second.
    `head_dim`: the head size of a family that may turn only a part of each head; `layer_kind`: of one whose kinds of
    layers (`FULL`, `SLIDING`) have tables of their own."""
    scaling = _section(config, layer_kind)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = "longrope" if scaling.get("long_factor") is not None and kind == "yarn" else _OTHER_NAMES.get(kind, kind)
    if kind not in KINDS:
        raise config.error(f"rope type {shown(kind)} is not supported (supported: {', '.join(KINDS)})")
    rotary_dim = _rotary_dim(config, scaling, head_dim)
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "dynamic" and scaling.get("alpha") is not None:  # HunYuan: another base, whatever the length
        turned = rotary_dim or head_dim
        if turned <= 2:
            raise scaling.error("alpha is not supported: remove it, or set factor")
        kind, theta = "default", theta * scaling.number("alpha") ** (turned / (turned - 2))
    freq_factors, axes = read_factors(config, "rope_freq_factors"), _read_axes(scaling)
    if kind == "default":
        return RotarySpec(theta=theta, rotary_dim=rotary_dim, freq_factors=freq_factors, axes=axes)
    own, factor = _original(config, scaling, kind, default_context)
    if kind == "longrope":
        freq_factors = read_factors(scaling, "short_factor")
        if not freq_factors or scaling.get("short_mscale") is not None or scaling.get("long_mscale") is not None:
            raise scaling.error("longrope needs short_factor and long_factor, and no short_mscale or long_mscale")
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
        attention_factor=_attention_factor(scaling, kind, factor, own),
        truncate=scaling.flag("truncate", True),
        freq_factors=freq_factors,
        axes=axes,
        long_freq_factors=read_factors(scaling, "long_factor") if kind == "longrope" else (),
    )


def read_rotaries(config: ForeignConfig, default_context: int, head_dim: int = 0) -> dict[str, RotarySpec | None]:
    """The rotary embedding of each kind of layer; None where `rope_parameters` has null for a kind, which turns
    nothing. One that is not nested holds for all kinds."""
    nested = _nested(config)
    return {
        kind: None
        if nested is not None and nested.has(kind) and nested.get(kind) is None
        else read_rotary(config, default_context, head_dim, kind if nested is not None else "")
        for kind in (FULL, SLIDING)
    }


def check_factors(config: ForeignConfig, rotary: RotarySpec, size: int) -> None:
    """Raises CheckpointError unless there are as many factors and axes as a head of `size` elements turns pairs."""
    pairs = (rotary.rotary_dim or size) // 2
    if len(rotary.axes) not in (0, pairs):
        raise config.error(f"mrope_section has {len(rotary.axes)} pairs of elements, a head of {size} turns {pairs}")
    for name, factors in (("rope", rotary.freq_factors), ("long rope", rotary.long_freq_factors)):
        if len(factors) != pairs and (factors or rotary.kind == "longrope"):
            raise config.error(f"{len(factors)} {name} frequency factors for a head size of {size}, must be {pairs}")


def read_factors(config: ForeignConfig, key: str) -> tuple[float, ...]:
    """A list of positive numbers, or none."""
    values = config.get(key)
    if values is None:
        return ()
    is_list = isinstance(values, list | tuple) and len(values) <= CONFIG_SIZES["head_dim"]
    if not is_list or any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < 1e12 for v in values):
        raise config.error(f"{key} must be a list of positive numbers, one a pair of elements, got {shown(values)}")
    return tuple(float(value) for value in values)


def _nested(config: ForeignConfig) -> ForeignConfig | None:
    """The object that has one rotary embedding for each kind of layer, or None."""
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    is_nested = scaling is not None and any(isinstance(scaling.get(kind), dict) for kind in (FULL, SLIDING))
    return scaling if is_nested else None


def _section(config: ForeignConfig, layer_kind: str) -> ForeignConfig:
    scaling = config.section("rope_scaling") or config.section("rope_parameters") or ForeignConfig({}, config.source)
    if layer_kind:
        return scaling.section(layer_kind) or ForeignConfig({}, config.source)
    if any(isinstance(scaling.get(kind), dict) for kind in (FULL, SLIDING)):
        raise scaling.error("a rotary embedding of its own for each kind of layer is not supported")
    return scaling


def _rotary_dim(config: ForeignConfig, scaling: ForeignConfig, head_dim: int) -> int:
    """The elements of a head that turn; 0: all."""
    factor = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if factor == 1.0:
        return 0
    if not head_dim:
        raise config.error(f"partial_rotary_factor {factor} is not supported (supported: 1.0)")
    if (turned := int(head_dim * factor)) < 2:
        raise config.error(f"partial_rotary_factor {factor} turns no pair of a head of {head_dim}: use at least 2")
    return turned


def _original(config: ForeignConfig, scaling: ForeignConfig, kind: str, default_context: int) -> tuple[int, float]:
    """The context before scaling, and the factor."""
    whole = config.size("max_position_embeddings", default_context)
    key = "original_max_position_embeddings"
    if kind == "dynamic":
        own = whole
    elif config.get(key) is not None:
        own = config.size(key)
    else:
        own = scaling.size(key, 0 if kind == "linear" else whole)
    if kind in ("yarn", "longrope") and scaling.get("factor") is None:
        return own, whole / own
    return own, scaling.number("factor")


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


def _attention_factor(scaling: ForeignConfig, kind: str, factor: float, own: int) -> float:
    """The factor of cosines and sines; 0 for kinds that have none."""
    if kind not in ("yarn", "longrope"):
        return 0.0
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(own)) if factor > 1 < own else 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_scale(factor, scaling.number("mscale")) / yarn_scale(factor, scaling.number("mscale_all_dim"))
    return yarn_scale(factor)
