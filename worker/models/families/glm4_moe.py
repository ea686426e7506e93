"""GLM-4.5, 4.6 and 4.7: a sigmoid router whose choice has a bias, a shared expert, and dense first layers."""

from __future__ import annotations

from allspan.worker.models.blocks.moe import Moe, SharedExpert
from allspan.worker.models.foreign.common import (
    head_size,
    model_spec,
    read_context,
    read_gated_mlp,
    read_gqa,
    read_norm,
)
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.experts import (
    EXPERT_GGUF_KEYS,
    expert_entries,
    expert_spellings,
    mixed,
    read_num_experts,
    read_router,
    shared_entries,
)
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms
from allspan.worker.weights.weight_map import DENSE, in_layer

_CONTEXT = 131072
_EPSILON = 1e-20


def _read(config: ForeignConfig) -> ModelSpec:
    rotary, norm = read_rotary(config, _CONTEXT, head_size(config)), read_norm(config)
    eps = norm.eps if config.flag("use_qk_norm") else 0.0
    attention = read_gqa(config, rotary, qkv_bias=config.flag("attention_bias"), qk_norm_eps=eps)
    width, norms = config.size("moe_intermediate_size"), Norms(norm)
    router = read_router(config, "sigmoid", config.flag("norm_topk_prob", True), _EPSILON)
    shared = SharedExpert(config.size("n_shared_experts", 1) * width)
    sparse = Moe(read_num_experts(config), width, router, shared, has_choice_bias=True)
    first = 0 if config.get("first_k_dense_replace") == 0 else config.size("first_k_dense_replace", 1)
    mlps = mixed(config, read_gated_mlp(config), sparse, range(first, config.size("num_hidden_layers")))
    layers = [LayerSpec(attention, mlp, norms, norms) for mlp in mlps]
    return model_spec(config, "glm4_moe", layers, read_context(config, rotary, _CONTEXT))


GLM4_MOE = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM", "Glm4MoeModel"),
    _read,
    gguf_architectures=("glm4moe",),
    weights=DENSE.with_entries(
        *expert_entries(),
        *shared_entries("mlp.shared_experts"),
        *in_layer(mlp_norm=("post_attention_layernorm", "post_attention_norm")),
        spellings=expert_spellings(),
    ),
    gguf_keys=EXPERT_GGUF_KEYS,
    gguf_values={"first_k_dense_replace": 0, "norm_topk_prob": False},
    has_draft_layers=True,
    renamed={"n_routed_experts": "num_experts"},
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "n_routed_experts": 128, "num_experts_per_tok": 8},
    turns_part=True,
)
