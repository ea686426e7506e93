"""Mistral: Llama with a sliding window. Ministral: some of its layers see all tokens. Ministral 3: YaRN, and queries
that grow with their position."""

from __future__ import annotations

from allspan.worker.models.blocks.position_scores import QueryScale
from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import read_windows
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE

_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Beginnings of the names of tensors of images, beside the text's."""
_CONTEXT = 131072
_WINDOW = 4096
"""Tokens, when the config does not speak of it: as transformers has it."""
_BETA, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def _read_mistral(config: ForeignConfig, family: str, window: int, query_scale: QueryScale | None = None) -> ModelSpec:
    """`window`: of a config that does not speak of it (0: none). `layer_types`, where given, says which layers have
    it."""
    if config.get("num_key_value_heads") is None:
        raise config.error("num_key_value_heads is missing")
    is_off = config.has("sliding_window") and not config.get("sliding_window")
    window = 0 if is_off or not (window or config.has("sliding_window")) else config.size("sliding_window", window)
    rotary = read_rotary(config, _CONTEXT)
    context = read_context(config, rotary, _CONTEXT)
    attention = read_gqa(config, rotary, query_scale=query_scale)
    layers = alike(config, attention, read_gated_mlp(config), read_windows(config, context, window))
    return model_spec(config, family, layers, context)


def _read_window(config: ForeignConfig) -> ModelSpec:
    return _read_mistral(config, "mistral", _WINDOW)


def _read_ministral(config: ForeignConfig) -> ModelSpec:
    return _read_mistral(config, "ministral", _WINDOW)


def _read_ministral3(config: ForeignConfig) -> ModelSpec:
    rope = config.section("rope_scaling") or config.section("rope_parameters")
    beta = next((each.number(_BETA) for each in (config, rope) if each is not None and each.get(_BETA)), 0.0)
    if not beta:
        return _read_mistral(config, "ministral3", 0)
    if rope is None or rope.get(_LENGTH) is None:
        raise config.error(f"{_BETA} {beta:g} needs rope_parameters with {_LENGTH}")
    return _read_mistral(config, "ministral3", 0, QueryScale("log_steps", rope.size(_LENGTH), beta))


MISTRAL = Family("mistral", ("MistralForCausalLM", "MistralModel"), _read_window, inside=("mistral3",), skipped=_IMAGES)
MINISTRAL = Family("ministral", ("MinistralForCausalLM", "MinistralModel"), _read_ministral)
MINISTRAL3 = Family(
    "ministral3",
    ("Ministral3ForCausalLM", "Ministral3Model"),
    _read_ministral3,
    gguf_architectures=("mistral3",),
    weights=DENSE.with_entries(interleaved=("gguf",)),
    inside=("mistral3",),
    skipped=_IMAGES,
    gguf_keys={"attention.temperature_scale": _BETA},
)
