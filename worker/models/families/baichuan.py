"""Baichuan 1 and 2: Llama, in 13B with ALiBi instead of the rotary embedding, in version 2 with a normalised head."""

from __future__ import annotations

from dataclasses import replace

from allspan.worker.models.foreign.common import alike, model_spec, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, Entry

_NORMALISED = 125696
"""The vocabulary of version 2."""
_IS_GGUF = "gguf_layers_tell_positions"
_LAYERS_7B, _LAYERS_13B = 32, 40


def _read(config: ForeignConfig) -> ModelSpec:
    has_slopes = _has_slopes(config)
    key = "model_max_length" if config.get("max_position_embeddings") is None else "max_position_embeddings"
    context = config.size(key)
    rotary = None if has_slopes else read_rotary(config, context)
    layers = alike(config, read_gqa(config, rotary, has_slopes=has_slopes), read_gated_mlp(config))
    spec = model_spec(config, "baichuan", layers, context)
    return replace(spec, has_normalised_head=spec.vocab_size == _NORMALISED and not spec.tie_word_embeddings)


def _has_slopes(config: ForeignConfig) -> bool:
    """Whether scores have ALiBi's slopes: where config.json has no `max_position_embeddings`. GGUF files do not say, so
    that the number of layers does."""
    if not config.flag(_IS_GGUF):
        return config.get("max_position_embeddings") is None
    layers = config.size("num_hidden_layers")
    if layers not in (_LAYERS_7B, _LAYERS_13B):
        raise config.error(
            f"block_count {layers}: the layers alone tell rotary positions ({_LAYERS_7B} layers, 7B) from ALiBi "
            f"({_LAYERS_13B}, 13B): use the model in Hugging Face's format"
        )
    return layers == _LAYERS_13B


BAICHUAN = Family(
    "baichuan",
    ("BaichuanForCausalLM",),
    _read,
    gguf_architectures=("baichuan",),
    weights=DENSE.with_entries(
        *(Entry(f"layers.{{i}}.{x}", "model.layers.{i}.self_attn.W_pack", f"blk.{{i}}.attn_{x}") for x in "qkv"),
        interleaved=("gguf",),
    ),
    gguf_values={_IS_GGUF: True},
)
