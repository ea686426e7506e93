"""Weight maps: canonical tensor names, the names that checkpoint formats give them, and how each splits over ranks.

A weight names the meaning of its dimensions; the split follows from that alone (`allspan.worker.models.shard.Shard`):
query heads, KV heads, the intermediate size and the vocabulary are split, everything else is replicated.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Dim(enum.Enum):
    """What the elements along one dimension of a weight are."""

    HIDDEN = "hidden"
    QUERY = "query heads × head size"
    KEY_VALUE = "KV heads × head size"
    HEAD = "head size"
    INTERMEDIATE = "intermediate"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight. Names hold `{i}` where the layer's number goes, and lack the suffix (".weight", ".bias")."""

    name: str
    hugging_face: str
    gguf: str
    dims: tuple[Dim, ...]
    """Of ".weight", [out, in] for a matrix; a ".bias" has the first one only."""


class WeightMap:
    """The entries of a family, found by canonical name. `naming` is "hugging_face" or "gguf"."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {entry.name: entry for entry in entries}

    def dims(self, name: str) -> tuple[Dim, ...]:
        """Dimensions of a canonical tensor such as "layers.3.q.weight"; KeyError if there is none."""
        entry, _, suffix = self._find(name)
        return entry.dims[:1] if suffix == "bias" else entry.dims

    def foreign(self, name: str, naming: str) -> str:
        """The checkpoint's name of a canonical tensor."""
        entry, layer, suffix = self._find(name)
        pattern: str = getattr(entry, naming)
        return f"{pattern.replace('{i}', layer)}.{suffix}"

    def _find(self, name: str) -> tuple[Entry, str, str]:
        stem, _, suffix = name.rpartition(".")
        if not stem.startswith("layers."):
            return self._entries[stem], "", suffix
        _, layer, rest = stem.split(".", 2)
        return self._entries["layers.{i}." + rest], layer, suffix


_LAYER = "model.layers.{i}."

DENSE = WeightMap(
    (
        Entry("embedding", "model.embed_tokens", "token_embd", (Dim.VOCABULARY, Dim.HIDDEN)),
        Entry("norm", "model.norm", "output_norm", (Dim.HIDDEN,)),
        Entry("lm_head", "lm_head", "output", (Dim.VOCABULARY, Dim.HIDDEN)),
        Entry("layers.{i}.input_norm", _LAYER + "input_layernorm", "blk.{i}.attn_norm", (Dim.HIDDEN,)),
        Entry("layers.{i}.q", _LAYER + "self_attn.q_proj", "blk.{i}.attn_q", (Dim.QUERY, Dim.HIDDEN)),
        Entry("layers.{i}.k", _LAYER + "self_attn.k_proj", "blk.{i}.attn_k", (Dim.KEY_VALUE, Dim.HIDDEN)),
        Entry("layers.{i}.v", _LAYER + "self_attn.v_proj", "blk.{i}.attn_v", (Dim.KEY_VALUE, Dim.HIDDEN)),
        Entry("layers.{i}.q_norm", _LAYER + "self_attn.q_norm", "blk.{i}.attn_q_norm", (Dim.HEAD,)),
        Entry("layers.{i}.k_norm", _LAYER + "self_attn.k_norm", "blk.{i}.attn_k_norm", (Dim.HEAD,)),
        Entry("layers.{i}.o", _LAYER + "self_attn.o_proj", "blk.{i}.attn_output", (Dim.HIDDEN, Dim.QUERY)),
        Entry("layers.{i}.mlp_norm", _LAYER + "post_attention_layernorm", "blk.{i}.ffn_norm", (Dim.HIDDEN,)),
        Entry("layers.{i}.gate", _LAYER + "mlp.gate_proj", "blk.{i}.ffn_gate", (Dim.INTERMEDIATE, Dim.HIDDEN)),
        Entry("layers.{i}.up", _LAYER + "mlp.up_proj", "blk.{i}.ffn_up", (Dim.INTERMEDIATE, Dim.HIDDEN)),
        Entry("layers.{i}.down", _LAYER + "mlp.down_proj", "blk.{i}.ffn_down", (Dim.HIDDEN, Dim.INTERMEDIATE)),
    )
)
"""Llama, Mistral, Qwen2 and Qwen3 name their weights alike."""
