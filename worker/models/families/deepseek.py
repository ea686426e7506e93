"""DeepSeek V2 and V3 and what took their shape (R1, Kimi K2, GLM-4.7-Flash): latent attention, shared experts, dense
first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allspan.kernels.router_spec import RouterSpec
from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.limits import CONFIG_SIZES
from allspan.worker.models.blocks.mla import Mla
from allspan.worker.models.blocks.moe import Moe, SharedExpert
from allspan.worker.models.foreign.common import model_spec, read_context, read_gated_mlp, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.experts import (
    EXPERT_GGUF_KEYS,
    MOST_EXPERTS,
    expert_entries,
    expert_spellings,
    mixed,
    read_num_experts,
    read_router,
    shared_entries,
)
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import check_factors, read_rotary
from allspan.worker.models.rope import RotarySpec, yarn_scale
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms
from allspan.worker.weights.weight_map import DENSE, in_layer

_CONTEXT = 4096
_EPSILON = 1e-20
_GROUP_METHODS = "greedy", "group_limited_greedy"
_GGUF = "gguf_sliding_window"
"""A key that configs of GGUF files have."""
_KEY_MLA, _VALUE_MLA, _VALUE = "attention.key_length_mla", "attention.value_length_mla", "attention.value_length"
"""Metadata of GGUF files that no config.json has, under its own names."""
_SIGMOID = 2
"""`expert_gating_func` of a sigmoid router."""
_SIZES = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"


def _deepseek_v2(config: ForeignConfig) -> ModelSpec:
    """A softmax router; of a GGUF file, whose architecture is that of all these families, perhaps that of V3.
    transformers' class has no use for `norm_topk_prob`."""
    if config.has(_GGUF):
        config = _from_gguf(config)
        if config.get("gguf_gating") == _SIGMOID:
            return _deepseek_v3(config)
    method = config.text("topk_method", _GROUP_METHODS[0])
    if method not in _GROUP_METHODS:
        raise config.error(f"topk_method {shown(method)} is not supported (supported: {', '.join(_GROUP_METHODS)})")
    if method == _GROUP_METHODS[0]:
        config = config.changed({"n_group": 1, "topk_group": 1})
    router = replace(read_router(config), group_score="max")
    return _spec(config, "deepseek_v2", router, has_choice_bias=False)


def _deepseek_v3(config: ForeignConfig) -> ModelSpec:
    """A sigmoid router whose choice has a bias."""
    for key, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if config.get(key) not in (None, value):
            raise config.error(f"{key} {shown(config.get(key))} is not supported (supported: {shown(value)})")
    router = read_router(config, "sigmoid", config.flag("norm_topk_prob", True), _EPSILON)
    return _spec(config, "deepseek_v3", router, has_choice_bias=True)


def _from_gguf(config: ForeignConfig) -> ForeignConfig:
    """With the sizes of heads, which new files say beside those of the absorbed form, and YaRN's `mscale_all_dim`, of
    which files have the tenth part."""
    key_name = _KEY_MLA if config.has(_KEY_MLA) else "head_dim"
    key, turned = _size(config, key_name), _size(config, "qk_rope_head_dim")
    if key <= turned:
        name = key_name if key_name == _KEY_MLA else "attention.key_length"
        raise config.error(f"{name} {key} must be greater than rope.dimension_count {turned}")
    value = _size(config, _VALUE_MLA if config.has(_VALUE_MLA) else _VALUE)
    changes: dict[str, Any] = {"qk_nope_head_dim": key - turned, "v_head_dim": value}
    if config.size("n_group", 1) > 1:
        changes["topk_method"] = _GROUP_METHODS[1] if config.get("gguf_gating") != _SIGMOID else None
    scaling = config.section("rope_scaling")
    if scaling is not None and scaling.get("mscale_all_dim"):
        both = dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scaling.number("mscale_all_dim"))
        changes["rope_scaling"] = {**config.get("rope_scaling"), **both}
    return config.changed(changes)


def _glm4_moe_lite(config: ForeignConfig) -> ModelSpec:
    """DeepSeek V3's layers, of which the first is dense where the config says nothing else."""
    return replace(_deepseek_v3(config), family="glm4_moe_lite")


def _spec(config: ForeignConfig, family: str, router: RouterSpec, has_choice_bias: bool) -> ModelSpec:
    if config.get("moe_layer_freq") not in (None, 1):
        raise config.error(f"moe_layer_freq {shown(config.get('moe_layer_freq'))} is not supported (supported: 1)")
    rotary, norms = read_rotary(config, _CONTEXT), Norms(read_norm(config))
    width, count = (
        config.size("moe_intermediate_size", most=CONFIG_SIZES["intermediate_size"]),
        config.size("num_hidden_layers"),
    )
    shared = (
        SharedExpert(config.size("n_shared_experts", most=MOST_EXPERTS) * width)
        if config.get("n_shared_experts")
        else None
    )
    sparse = Moe(read_num_experts(config), width, router, shared, has_choice_bias=has_choice_bias)
    first = config.size("first_k_dense_replace") if config.get("first_k_dense_replace") else 0
    attention = _attention(config, rotary)
    mlps = mixed(config, read_gated_mlp(config), sparse, range(first, count))
    layers = [LayerSpec(attention, mlp, norms, norms) for mlp in mlps]
    return model_spec(config, family, layers, read_context(config, rotary, _CONTEXT))


def _attention(config: ForeignConfig, rotary: RotarySpec) -> Mla:
    latent, key, turned, value = (_size(config, name) for name in _SIZES)
    if turned % 2:
        raise config.error(f"qk_rope_head_dim {turned} is odd: rotary embedding turns pairs of elements")
    check_factors(config, rotary, turned)
    return Mla(
        num_heads=config.size("num_attention_heads"),
        q_rank=_size(config, "q_lora_rank") if config.get("q_lora_rank") not in (None, 0) else 0,
        kv_rank=latent,
        key_dim=key,
        rotary_dim=turned,
        value_dim=value,
        rotary=rotary,
        scale=(key + turned) ** -0.5 * _score_scale(config),
        is_interleaved=config.flag("rope_interleave", True),
        bias=config.flag("attention_bias"),
    )


def _size(config: ForeignConfig, name: str) -> int:
    return config.size(name, most=CONFIG_SIZES["head_dim"])


def _score_scale(config: ForeignConfig) -> float:
    """YaRN's second factor: the square of its temperature, where `mscale_all_dim` is given."""
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    kind = "default" if scaling is None else scaling.text("rope_type", scaling.text("type", "default"))
    if scaling is None or kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return yarn_scale(scaling.number("factor"), scaling.number("mscale_all_dim")) ** 2


_WEIGHTS = DENSE.with_entries(
    *expert_entries(),
    *shared_entries("mlp.shared_experts"),
    *in_layer(
        q_a=("self_attn.q_a_proj", "attn_q_a"),
        q_a_norm=("self_attn.q_a_layernorm", "attn_q_a_norm"),
        q_b=("self_attn.q_b_proj", "attn_q_b"),
        kv_a=("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        kv_a_norm=("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        kv_b=("self_attn.kv_b_proj", "attn_kv_b"),
    ),
    interleaved=("hugging_face", "gguf"),
    spellings=expert_spellings(),
)

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    ("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    _deepseek_v2,
    gguf_architectures=("deepseek2",),
    weights=_WEIGHTS,
    gguf_keys={
        **EXPERT_GGUF_KEYS,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        **{key: key for key in (_KEY_MLA, _VALUE_MLA, _VALUE)},
        "rope.dimension_count": "qk_rope_head_dim",
    },
    gguf_values={"q_lora_rank": None, "first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": None},
    has_latents=True,
    has_draft_layers=True,
    renamed={"n_routed_experts": "num_experts"},
    defaults={
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    _deepseek_v3,
    other_types=("kimi_k2",),
    weights=_WEIGHTS,
    has_latents=True,
    has_draft_layers=True,
    renamed={"n_routed_experts": "num_experts"},
    defaults={
        **DEEPSEEK_V2.defaults,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    other_types=(),
    architectures=("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
    read=_glm4_moe_lite,
    defaults={
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
)
