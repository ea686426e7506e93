"""Weight maps: canonical tensor names, and the names that checkpoint formats give them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Foreign:
    """A checkpoint's tensor. `name` holds `{i}` where the layer's number goes, `{e}` where that of an expert does, and
    lacks the suffix (".weight", ".bias"). Neighbouring parts of a layer that have the same name are one tensor, below
    each other."""

    name: str
    offset: float = 0.0
    """The canonical tensor is that much larger: 1 for norms that are stored as their distance from 1."""
    has_suffix: bool = True
    bias: str = ""
    """The name of the bias; empty: that of the weight, with its own suffix."""
    is_transposed: bool = False
    """The matrix lies there as [in, out]."""
    alternates: bool = False
    """Says that of parts that are one tensor the first row of each comes first, then the second of each, and so on."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight. `name` as in `Foreign`, with `{i}` alone."""

    name: str
    hugging_face: str | Foreign
    gguf: str | Foreign

    def foreign(self, naming: str) -> Foreign:
        found: str | Foreign = getattr(self, naming)
        return Foreign(found) if isinstance(found, str) else found


@dataclass(frozen=True, slots=True)
class Spelling:
    """Entries that stand for the usual ones in checkpoints that have a tensor of the name of the first."""

    naming: str
    entries: tuple[Entry, ...]

    def is_in(self, names: Collection[str]) -> bool:
        """Whether a checkpoint with tensors of these names is spelled so."""
        first = self.entries[0].foreign(self.naming)
        named = re.escape(first.name).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+")
        pattern = re.compile(named + (r"\.weight" if first.has_suffix else ""))
        return any(pattern.fullmatch(name) for name in names)


class WeightMap:
    """The entries of a family, found by canonical name. `naming` is "hugging_face" or "gguf"."""

    def __init__(
        self, entries: Iterable[Entry], interleaved: Iterable[str] = (), spellings: Iterable[Spelling] = ()
    ) -> None:
        """`interleaved`: namings of checkpoints whose heads have the pairs that rotary embedding turns side by side
        (0, 1), (2, 3) …, not half a head apart. `spellings`: what `as_spelled` chooses from."""
        self._entries = {entry.name: entry for entry in entries}
        self._interleaved = frozenset(interleaved)
        self._spellings = tuple(spellings)

    def with_entries(
        self, *entries: Entry, interleaved: Iterable[str] = (), spellings: Iterable[Spelling] = ()
    ) -> WeightMap:
        """Another map, in which these are instead of those of the same names, or new."""
        merged = self._entries | {entry.name: entry for entry in entries}
        known = self._spellings + tuple(spellings)
        return WeightMap(merged.values(), self._interleaved | frozenset(interleaved), known)

    def as_spelled(self, naming: str, names: Collection[str]) -> WeightMap:
        """The map for a checkpoint with tensors of these names."""
        used = [each for each in self._spellings if each.naming == naming and each.is_in(names)]
        return self.with_entries(*(entry for spelling in used for entry in spelling.entries))

    def in_gguf(self, names: Collection[str]) -> WeightMap:
        """The map for a GGUF file with tensors of these names: q, k and v may be one, and so may gate and up."""
        fused = {}
        if "blk.0.attn_qkv.weight" in names:
            fused = dict.fromkeys("qkv", "attn_qkv")
        if "blk.0.ffn_up.weight" in names and "blk.0.ffn_gate.weight" not in names:
            fused["gate"] = "ffn_up"
        entries = {role: self._entries["layers.{i}." + role] for role in fused}
        fused_map = self.with_entries(
            *(Entry(entry.name, entry.hugging_face, "blk.{i}." + fused[role]) for role, entry in entries.items())
        )
        return fused_map.as_spelled("gguf", names)

    def of_layer(self, number: int) -> WeightMap:
        """The map for a model whose only layer is this one of the checkpoint's."""
        entries = (
            replace(
                entry,
                hugging_face=_of_layer(entry.foreign("hugging_face"), number),
                gguf=_of_layer(entry.foreign("gguf"), number),
            )
            for entry in self._entries.values()
        )
        return WeightMap(entries, self._interleaved)

    def is_interleaved(self, naming: str) -> bool:
        return naming in self._interleaved

    def foreign(self, name: str, naming: str, expert: int = 0) -> str:
        """The checkpoint's name of a canonical tensor such as "layers.3.q.weight"; KeyError if there is none."""
        entry, layer, suffix = self._find(name)
        foreign = entry.foreign(naming)
        is_own = suffix == "bias" and bool(foreign.bias)
        filled = (foreign.bias if is_own else foreign.name).replace("{i}", layer).replace("{e}", str(expert))
        return f"{filled}.{suffix}" if foreign.has_suffix and not is_own else filled

    def of_experts(self, name: str, naming: str, count: int) -> list[str]:
        """The checkpoint's names of a canonical tensor that `count` experts have: one, where it has that of all."""
        if not self.is_by_expert(name, naming):
            return [self.foreign(name, naming)]
        entry, layer, suffix = self._find(name)
        foreign = entry.foreign(naming)
        before, after = foreign.name.replace("{i}", layer).split("{e}")
        ending = f"{after}.{suffix}" if foreign.has_suffix else after
        return [f"{before}{expert}{ending}" for expert in range(count)]

    def offset(self, name: str, naming: str) -> float:
        """See `Foreign`."""
        return self._find(name)[0].foreign(naming).offset

    def is_transposed(self, name: str, naming: str) -> bool:
        """See `Foreign`; a bias is not."""
        return not name.endswith(".bias") and self._find(name)[0].foreign(naming).is_transposed

    def alternates(self, name: str, naming: str) -> bool:
        """See `Foreign`."""
        return self._find(name)[0].foreign(naming).alternates

    def is_by_expert(self, name: str, naming: str) -> bool:
        """Whether every expert has a tensor of its own."""
        return "{e}" in self._find(name)[0].foreign(naming).name

    def _find(self, name: str) -> tuple[Entry, str, str]:
        stem, _, suffix = name.rpartition(".")
        if not stem.startswith("layers."):
            return self._entries[stem], "", suffix
        _, layer, rest = stem.split(".", 2)
        return self._entries["layers.{i}." + rest], layer, suffix


def _of_layer(foreign: Foreign, number: int) -> Foreign:
    name, bias = (each.replace("{i}", str(number)) for each in (foreign.name, foreign.bias))
    return replace(foreign, name=name, bias=bias)


_LAYER = "model.layers.{i}."


def in_layer(offset: float = 0.0, **names: tuple[str, str]) -> tuple[Entry, ...]:
    """Entries of each layer: a canonical name → Hugging Face's behind `model.layers.N.`, and GGUF's behind `blk.N.`.
    `offset`: of Hugging Face's tensors, see `Foreign`."""
    return tuple(
        Entry("layers.{i}." + name, Foreign(_LAYER + theirs, offset), "blk.{i}." + gguf)
        for name, (theirs, gguf) in names.items()
    )


DENSE = WeightMap(
    (
        Entry("embedding", "model.embed_tokens", "token_embd"),
        Entry("norm", "model.norm", "output_norm"),
        Entry("lm_head", "lm_head", "output"),
        Entry("layers.{i}.input_norm", _LAYER + "input_layernorm", "blk.{i}.attn_norm"),
        Entry("layers.{i}.q", _LAYER + "self_attn.q_proj", "blk.{i}.attn_q"),
        Entry("layers.{i}.k", _LAYER + "self_attn.k_proj", "blk.{i}.attn_k"),
        Entry("layers.{i}.v", _LAYER + "self_attn.v_proj", "blk.{i}.attn_v"),
        Entry("layers.{i}.q_norm", _LAYER + "self_attn.q_norm", "blk.{i}.attn_q_norm"),
        Entry("layers.{i}.k_norm", _LAYER + "self_attn.k_norm", "blk.{i}.attn_k_norm"),
        Entry("layers.{i}.sinks", Foreign(_LAYER + "self_attn.sinks", has_suffix=False), "blk.{i}.attn_sinks"),
        Entry("layers.{i}.o", _LAYER + "self_attn.o_proj", "blk.{i}.attn_output"),
        Entry("layers.{i}.mlp_norm", _LAYER + "post_attention_layernorm", "blk.{i}.ffn_norm"),
        Entry("layers.{i}.gate", _LAYER + "mlp.gate_proj", "blk.{i}.ffn_gate"),
        Entry("layers.{i}.up", _LAYER + "mlp.up_proj", "blk.{i}.ffn_up"),
        Entry("layers.{i}.down", _LAYER + "mlp.down_proj", "blk.{i}.ffn_down"),
    )
)
"""Llama, Mistral, Qwen2 and Qwen3 name their weights alike."""
