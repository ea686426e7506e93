"""Granite 3 and 4, dense: Llama with factors of embeddings, sublayers, scores and logits."""

from __future__ import annotations

from dataclasses import replace

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.foreign.common import model_spec, read_context, read_gated_mlp, read_gqa, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms, NormSpec
from allspan.worker.weights.weight_map import DENSE, in_layer

_CONTEXT = 2048
_IS_GGUF = "is_gguf"


def _read(config: ForeignConfig) -> ModelSpec:
    """The residual stream is held divided by the factor of sublayers, so that these add to it as they are, and its
    norms have an eps smaller by that factor's square. The last norm has the factor of logits, and undoes that of an
    embedding to which the head is tied."""
    residual, eps = config.number("residual_multiplier", 1.0), read_norm(config).eps
    rotary = read_rotary(config, _CONTEXT)
    context = read_context(config, rotary, _CONTEXT)
    scale = config.number("attention_multiplier", 0.0 if config.flag(_IS_GGUF) else 1.0)
    bias = config.flag("attention_bias")
    attention = read_gqa(
        config, rotary if config.flag("rotates", True) else None, scale=scale, qkv_bias=bias, output_bias=bias
    )
    mlp, norms = read_gated_mlp(config, config.flag("mlp_bias")), Norms(NormSpec(eps / residual**2))
    layers = [LayerSpec(attention, mlp, norms, norms)] * config.size("num_hidden_layers")
    embedding = config.number("embedding_multiplier", 1.0) / residual
    logits = 1 / config.number("logits_scaling", 1.0)
    spec = model_spec(config, "granite", layers, context)
    tied = embedding if spec.tie_word_embeddings else 1.0
    return replace(spec, norm=NormSpec(eps / residual**2, logits / tied), embedding_scale=embedding)


def _read_hybrid(config: ForeignConfig) -> ModelSpec:
    """Granite 4's class for all its models, of which those without experts and recurrent layers are dense."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if not isinstance(kinds, list):
        raise config.error(f"layer_types must be a list of names, got {shown(kinds)}")
    if unknown := {str(kind) for kind in kinds} - {"attention", "full_attention"}:
        raise config.error(
            f"layer_types {shown(min(unknown))} is not supported (supported: attention): use a model without "
            "recurrent layers, such as granite-4.0-micro"
        )
    if config.get("num_local_experts") != 0:
        raise config.error(
            f"num_local_experts {shown(config.get('num_local_experts'))} is not supported (supported: 0)"
        )
    if len(kinds) != config.size("num_hidden_layers"):
        raise config.error(f"layer_types must name num_hidden_layers kinds, got {len(kinds)}")
    position = config.text("position_embedding_type")
    if position not in ("rope", "nope", ""):
        raise config.error(f"position_embedding_type {shown(position)} is not supported (supported: rope, nope)")
    values = {"intermediate_size": config.get("shared_intermediate_size"), "rotates": position == "rope"}
    return replace(_read(config.changed(values)), family="granitemoehybrid")


GRANITE = Family(
    "granite",
    ("GraniteForCausalLM", "GraniteModel"),
    _read,
    gguf_architectures=("granite",),
    weights=DENSE.with_entries(interleaved=("gguf",)),
    gguf_keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
        "rope.scaling.finetuned": "rotates",
    },
    gguf_values={_IS_GGUF: True},
)

GRANITE_HYBRID = Family(
    "granitemoehybrid",
    ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"),
    _read_hybrid,
    weights=DENSE.with_entries(
        *in_layer(
            gate=("shared_mlp.input_linear", "ffn_gate"),
            up=("shared_mlp.input_linear", "ffn_up"),
            down=("shared_mlp.output_linear", "ffn_down"),
        )
    ),
    defaults={"num_local_experts": 8, "shared_intermediate_size": 1024},
)
