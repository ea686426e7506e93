"""EXAONE 4: norms behind the blocks alone, q and k normalised head by head. Where some layers have a window, only these
turn queries and keys."""

from __future__ import annotations

from dataclasses import replace

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.foreign.common import model_spec, read_context, read_gated_mlp, read_gqa, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import FULL, SLIDING, read_pattern
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms
from allspan.worker.weights.weight_map import DENSE, in_layer

_CONTEXT = 2048
_PATTERN = "sliding_window_pattern"


def _read(config: ForeignConfig) -> ModelSpec:
    rotary, norm = read_rotary(config, _CONTEXT), read_norm(config)
    context, window = read_context(config, rotary, _CONTEXT), 0
    kinds = [FULL] * config.size("num_hidden_layers")
    if config.get("sliding_window") is not None:
        window, kinds = config.size("sliding_window"), _kinds(config)
    attention, norms = read_gqa(config, rotary, qk_norm_eps=norm.eps), Norms(None, norm)
    blocks = {
        SLIDING: replace(attention, window=window if window < context else 0),
        FULL: replace(attention, rotary=None if window else rotary),
    }
    mlp = read_gated_mlp(config)
    layers = [LayerSpec(blocks[kind], mlp, norms, norms) for kind in kinds]
    return model_spec(config, "exaone4", layers, context)


def _kinds(config: ForeignConfig) -> list[str]:
    """The kind of each layer. A pattern may be letters, "LLLG": L of a layer with a window, G of one without."""
    letters = config.get(_PATTERN)
    if isinstance(letters, str):
        if not letters or {*letters} - {"L", "G"}:
            raise config.error(f"{_PATTERN} must be a number or of the letters L and G, got {shown(letters)}")
        count = config.size("num_hidden_layers")
        config = config.changed({_PATTERN: [letters[layer % len(letters)] == "L" for layer in range(count)]})
    return read_pattern(config, _PATTERN)


EXAONE4 = Family(
    "exaone4",
    ("Exaone4ForCausalLM", "Exaone4Model"),
    _read,
    gguf_architectures=("exaone4",),
    weights=DENSE.with_entries(
        *in_layer(
            attention_output_norm=("post_attention_layernorm", "post_attention_norm"),
            mlp_output_norm=("post_feedforward_layernorm", "post_ffw_norm"),
        )
    ),
    defaults={"sliding_window": 4096, _PATTERN: 4, "rms_norm_eps": 1e-5},
    gguf_keys={"attention.sliding_window_pattern": _PATTERN},
    gguf_values={"sliding_window": None},
)
