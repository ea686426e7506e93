"""Layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2) that lie behind the last layer of a
checkpoint: those of DeepSeek V3 and of GLM-4.5. Of several the first is used, for every draft."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from allspan.worker.models.blocks.draft_inputs import ProjectedPair
from allspan.worker.models.spec import HeadSpec, ModelSpec
from allspan.worker.weights.weight_map import Entry, Foreign, WeightMap


def has_mtp(names: Collection[str], target: ModelSpec) -> bool:
    """Whether a checkpoint of Hugging Face's names has such a layer."""
    return f"model.layers.{len(target.layers)}.eh_proj.weight" in names


def mtp_spec(target: ModelSpec) -> HeadSpec:
    """The layer is like the last one of its target, reads what the target's head reads, and shares the embedding and
    the head, of which checkpoints have copies."""
    own = {field.name: getattr(target, field.name) for field in fields(ModelSpec)}
    return HeadSpec(
        **own | {"layers": target.layers[-1:]},
        reads=ProjectedPair(target.norm.eps),
        features=(len(target.layers),),
        num_embeddings=target.vocab_size,
        has_embedding=False,
        has_head=False,
        chains_normed=True,
    )


def mtp_weights(weights: WeightMap, target: ModelSpec) -> WeightMap:
    """The names of the layer's tensors, from those of its target's."""
    number = len(target.layers)
    names = {
        "embedding_norm": ("enorm", "nextn.enorm"),
        "state_norm": ("hnorm", "nextn.hnorm"),
        "eh_proj": ("eh_proj", "nextn.eh_proj"),
        "norm": ("shared_head.norm", "nextn.shared_head_norm"),
    }
    entries = (
        Entry(name, Foreign(f"model.layers.{number}.{theirs}"), f"blk.{number}.{gguf}")
        for name, (theirs, gguf) in names.items()
    )
    return weights.of_layer(number).with_entries(*entries)
