"""What a model of a spec holds: its pieces in order, their tensors in a checkpoint, its layers' cache groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allspan.protos.api.errors import ConfigError
from allspan.worker.cache.spec import CacheGroup, CacheSpec, PageLifetime
from allspan.worker.models.pieces import TP, Axis, Linear, Part, Piece, Table, Vector, tensors_of
from allspan.worker.models.shard import Shard, split
from allspan.worker.models.spec import HeadSpec, ModelSpec, NormSpec
from allspan.worker.weights.weight_map import WeightMap

IGNORED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Left over in some checkpoints: tables that are computed (or read with the config) anyway."""

ATTENTION_NORMS = "input_norm", "attention_output_norm"
"""Names of the norms before and after a layer's attention block."""
MLP_NORMS = "mlp_norm", "mlp_output_norm"
"""Names of the norms before and after a layer's MLP block."""


def embedding_of(spec: ModelSpec) -> Table:
    """With tied embeddings the head, too."""
    count = spec.num_embeddings if isinstance(spec, HeadSpec) else spec.vocab_size
    return Table("embedding", Axis(count, group=TP), Axis(spec.hidden_size), spec.embedding_scale)


def lookup_of(spec: ModelSpec) -> Linear:
    """The embedding as a linear layer whose inputs are tokens, as adapters change it. Its weight is the embedding's,
    transposed."""
    table = embedding_of(spec)
    return Linear(table.name, (Part(table.name, table.inputs),), table.rows)


def head_of(spec: ModelSpec) -> Linear:
    """The head of a model whose embeddings are not tied; of one whose are, what adapters change as its head."""
    rows, inputs = Part("lm_head", Axis(spec.vocab_size, group=TP)), Axis(spec.hidden_size)
    return Linear("lm_head", (rows,), inputs, has_unit_rows=spec.has_normalised_head)


def layout(spec: ModelSpec) -> tuple[Piece, ...]:
    """Everything that a model of this spec holds, in the order in which it is read."""
    hidden, head = Axis(spec.hidden_size), spec if isinstance(spec, HeadSpec) else None
    pieces: list[Piece] = [embedding_of(spec)] if head is None or head.has_embedding else []
    if head is not None:
        pieces += head.reads.pieces(hidden)
    for i in range(len(spec.layers)):
        pieces += layer_pieces(spec, i)
    pieces.append(Vector("norm.weight", hidden, spec.norm.scale))
    if not spec.tie_word_embeddings and (head is None or head.has_head):
        pieces.append(head_of(spec))
    return tuple(pieces)


def held_layout(spec: ModelSpec, shard: Shard) -> tuple[Piece, ...]:
    """What a rank holds parts of: all of `layout`, or in a pipeline the layers of its stage, before the first one the
    embedding, behind the last one the norm and the head (which may be the embedding)."""
    if isinstance(spec, HeadSpec):  # in no pipeline
        return layout(spec)
    stage, last = shard.stage, (embedding_of(spec) if spec.tie_word_embeddings else head_of(spec)).name
    names = {*((embedding_of(spec).name,) if stage.is_first else ()), *(("norm.weight", last) if stage.is_last else ())}
    prefixes = tuple(f"layers.{number}." for number in shard.layers(len(spec.layers)))
    return tuple(piece for piece in layout(spec) if piece.name in names or piece.name.startswith(prefixes))


def layer_pieces(spec: ModelSpec, number: int) -> list[Piece]:
    """Returns the pieces of one layer, its norms between its blocks."""
    layer, hidden, prefix = spec.layers[number], Axis(spec.hidden_size), f"layers.{number}."

    def norm(name: str, spec: NormSpec | None) -> list[Piece]:
        return [] if spec is None else [Vector(f"{prefix}{name}.weight", hidden, spec.scale)]

    return [
        *norm(ATTENTION_NORMS[0], layer.attention_norms.before),
        *layer.attention.pieces(prefix, hidden),
        *norm(ATTENTION_NORMS[1], layer.attention_norms.after),
        *norm(MLP_NORMS[0], layer.mlp_norms.before),
        *layer.mlp.pieces(prefix, hidden),
        *norm(MLP_NORMS[1], layer.mlp_norms.after),
    ]


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """Where a checkpoint holds a canonical tensor, or one expert's of it."""

    canonical: str
    name: str
    shape: tuple[int, ...]
    """The shape of this tensor alone; others may lie above and below it in the checkpoint's."""
    rows: int
    """The dimension along which they do."""


def foreign_tensors(spec: ModelSpec, weights: WeightMap, naming: str) -> Iterator[ForeignTensor]:
    """Yields the foreign tensors of every canonical one; those that are one tensor in the checkpoint follow each other
    as they lie there."""
    for piece in layout(spec):
        experts = piece.experts.count if isinstance(piece, Linear) and piece.experts is not None else 0
        for name, axes in tensors_of(piece):
            shape, rows = tuple(axis.size for axis in axes), int(experts > 0)
            if weights.is_transposed(name, naming):
                shape, rows = (*shape[:-2], shape[-1], shape[-2]), rows + 1
            if experts and weights.is_by_expert(name, naming):
                for expert in range(experts):
                    yield ForeignTensor(name, weights.foreign(name, naming, expert), shape[1:], 0)
            else:
                yield ForeignTensor(name, weights.foreign(name, naming), shape, rows)


def expected_shapes(spec: ModelSpec, weights: WeightMap, naming: str) -> dict[str, tuple[int, ...]]:
    """Checkpoint name → shape of the whole tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for each in foreign_tensors(spec, weights, naming):
        shape = list(each.shape)
        if each.name in shapes:
            shape[each.rows] += shapes[each.name][each.rows]
        shapes[each.name] = tuple(shape)
    return shapes


def groups_of(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Layers whose pages are alike and are held equally long: those that keep all tokens first, then by their numbers.
    The first group is the one whose shared pages a device may read once for several requests."""
    groups: dict[tuple[Axis, PageLifetime, bool], list[int]] = {}
    for number, layer in enumerate(spec.layers):
        block = layer.attention
        groups.setdefault((block.kv_heads, block.lifetime, block.is_latent), []).append(number)
    ordered = sorted(groups, key=lambda key: not key[1].keeps_all)
    return tuple(tuple(groups[key]) for key in ordered)


def cache_groups(spec: ModelSpec, shard: Shard, page_size: int, dtype: str) -> tuple[CacheGroup, ...]:
    """What a rank's pages hold."""
    made, own = [], shard.layers(len(spec.layers))
    for group in groups_of(spec):
        layers = tuple(layer for layer in group if layer in own)
        block = spec.layers[group[0]].attention
        heads = block.kv_heads
        pages = CacheSpec(page_size, len(layers), len(shard.units(heads)), heads.unit, dtype, block.is_latent)
        made.append(CacheGroup(pages, layers, block.lifetime))
    return tuple(made)


def check_ranks(spec: ModelSpec, size: int) -> None:
    """Raises ConfigError for more ranks than query heads: a rank without heads would only wait for the others."""
    heads = min(layer.attention.heads.count for layer in spec.layers)
    if size > heads:
        raise ConfigError(f"ranks {size} is more than the model's {heads} query heads: use at most {heads} ranks")


def check_stages(spec: ModelSpec, size: int) -> None:
    """Raises ConfigError for stages of a pipeline without a layer of each cache group: a page number means the same
    page on every rank."""
    for layers in groups_of(spec):
        for stage, own in enumerate(split(len(spec.layers), size)):
            if not any(layer in own for layer in layers):
                some = "layer" if len(groups_of(spec)) == 1 else f"layer like layer {layers[0]}"
                raise ConfigError(
                    f"pipeline_parallel_size is {size}, but stage {stage} of {len(spec.layers)} layers would have no "
                    f"{some}: use fewer stages"
                )
