"""The one decoder: a ModelSpec and a rank's shard become a Program. No family has one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import ATTENTION_NORMS, MLP_NORMS, groups_of, head_of
from allspan.worker.models.own_rows import OwnRows
from allspan.worker.models.pieces import Axis
from allspan.worker.models.spec import HeadSpec
from allspan.worker.models.sublayer import Bindings, Stream, StreamBuilder, Sublayer
from allspan.worker.program.program import Program, Rows, Slot


@dataclass(frozen=True, slots=True)
class Decoder:
    """The forward pass of one step, and what its named slots are bound to.

    Inputs: ids, logits_rows; positions, or where a token has several the positions of each axis and row_numbers;
    embedding_rows and embedding_places (None: all tokens are given by ids); slots and attention (an AttentionMeta), and
    those of further cache groups and kinds of attention as slots.1, attention.1 …. Where a rank attends for its own
    tokens alone, positions, slots and attention are of those, own_rows are their rows among all tokens, and own_places
    of each token its place among own ones, or -1. Caches are k_cache.N, v_cache.N,
    k_scales.N and v_scales.N of every layer N; weights have their canonical names.
    Output: this rank's columns of the logits; of a stage of a pipeline that is not the last, the residual stream.
    """

    program: Program
    bindings: Bindings
    hidden: Slot
    """What the head reads: a row of every row of logits."""
    residual: Slot
    """The residual stream of all tokens: what a stage of a pipeline begins with, and what it hands on."""
    features: Slot | None = None
    """States of all tokens, side by side, as `build_decoder` was asked for them."""
    given: Slot | None = None
    """What a draft head reads beside ids, to be filled before it runs."""
    chained: Slot | None = None
    """What the row of a draft head's own draft reads, for every row of logits, by which the draft is chosen."""


def build_decoder(
    holding: Holding, quantised_cache: bool = False, features: tuple[int, ...] = (), is_chained: bool = False
) -> Decoder:
    """Embedding, layers, final norm and head, or those of a pipeline's stage: every layer is an attention block and an
    MLP block. `features`: the numbers of layers before which the residual stream of all tokens is kept; the number of
    layers itself stands for what the head reads. `is_chained`: of a draft head, which is given its own states."""
    return _Decoder(holding, quantised_cache, features).build(is_chained)


class _Decoder:
    def __init__(self, holding: Holding, quantised_cache: bool, features: tuple[int, ...]) -> None:
        self._holding, self._spec = holding, holding.spec
        self._builder = StreamBuilder(holding, quantised_cache)
        self._program = self._builder.program
        self._kept_layers, self._features = features, None
        if features:
            width = len(features) * holding.spec.hidden_size
            self._features = self._program.buffer("features", Rows.TOKENS, width, is_exact=True)
        self._group_of: Mapping[int, int] = {
            layer: group for group, layers in enumerate(groups_of(holding.spec)) for layer in layers
        }

    def build(self, is_chained: bool) -> Decoder:
        spec, program, holding, builder = self._spec, self._program, self._holding, self._builder
        stream, head = builder.stream(Rows.TOKENS), spec if isinstance(spec, HeadSpec) else None
        if holding.shard.stage.is_first:
            self._embed(stream)
        given: Slot | None = None
        first: Slot | None = None
        if head is not None:
            given = builder.buffer("given", Rows.TOKENS, head.reads.width(spec.hidden_size, is_chained))
            first = head.reads.emit(builder, stream, given, is_chained)
        residual = stream.residual
        keeps_all = len(spec.layers) in self._kept_layers
        for number in holding.shard.layers(len(spec.layers)):
            layer, is_last = spec.layers[number], number == len(spec.layers) - 1 and not keeps_all
            attention = self._sublayer(number, stream, is_attention=True)
            x = attention.normed() if number or first is None else first
            self._keep(number, residual)  # it lacks nothing of the layers before: the norm has added all
            attended = layer.attention.mix(attention, x)
            if is_last and not holding.shard.attends_apart:
                attention.stream, attended = stream, attended = self._wanted_rows(stream, attended)
            layer.attention.project(attention, attended)
            if is_last and holding.shard.attends_apart:  # rows of logits may be of any rank's tokens
                builder.flush(stream)
                stream = self._wanted_residual(stream)
            mlp = self._sublayer(number, stream, is_attention=False)
            layer.mlp.emit(mlp, mlp.normed())
        builder.flush(stream)
        if not holding.shard.stage.is_last:
            return Decoder(program.build(residual), builder.bindings, stream.x, residual)
        builder.norm(stream.residual, "norm.weight", spec.norm, stream.x)
        if keeps_all:
            self._keep(len(spec.layers), stream.x)
            stream = self._wanted_states(stream)
        logits = program.buffer(
            "logits", Rows.LOGITS, len(holding.shard.part(head_of(spec).parts[0].rows)), is_exact=True
        )
        holding.emit_logits(program, stream.x, logits)
        if spec.final_soft_cap:
            program.op("soft_cap", logits, spec.final_soft_cap)
        chained = (stream.x if head.chains_normed else stream.residual) if head else None
        return Decoder(program.build(logits), builder.bindings, stream.x, residual, self._features, given, chained)

    def _keep(self, layer: int, state: Slot) -> None:
        """Copies a state of all tokens to its places among the features."""
        for place, wanted in enumerate(self._kept_layers):
            if wanted == layer and self._features is not None:
                self._program.op("put_columns", state, place * self._spec.hidden_size, self._features)

    def _embed(self, stream: Stream) -> None:
        program, holding = self._program, self._holding
        holding.emit_embedding(program, program.input("ids"), stream.residual)
        if holding.shard.size > 1:
            program.op("all_reduce", stream.residual)
        rows, places = (program.input(name) for name in ("embedding_rows", "embedding_places"))
        program.op("put_rows", rows, places, self._spec.embedding_scale, stream.residual)

    def _sublayer(self, number: int, stream: Stream, is_attention: bool) -> Sublayer:
        layer, hidden, prefix = self._spec.layers[number], Axis(self._spec.hidden_size), f"layers.{number}."
        names, norms = (ATTENTION_NORMS, layer.attention_norms) if is_attention else (MLP_NORMS, layer.mlp_norms)
        block = layer.attention if is_attention else layer.mlp
        pieces = block.pieces(prefix, hidden)
        kind = OwnRows if is_attention and self._holding.shard.attends_apart else Sublayer
        return kind(self._builder, number, self._group_of[number], (names, norms), pieces, stream)

    def _wanted_rows(self, stream: Stream, attended: Slot) -> tuple[Stream, Slot]:
        """Past the last attention no row is read by another: only those whose logits are wanted go on."""
        program, rows = self._program, self._program.input("logits_rows", Rows.LOGITS)
        wanted = self._builder.buffer("attended", Rows.LOGITS, program.width(attended))
        program.op("gather_rows", attended, rows, wanted)
        return self._wanted_residual(stream), wanted

    def _wanted_residual(self, stream: Stream) -> Stream:
        """A stream that begins with the rows of `stream` whose logits are wanted."""
        last, rows = self._builder.stream(Rows.LOGITS), self._program.input("logits_rows", Rows.LOGITS)
        self._program.op("gather_rows", stream.residual, rows, last.residual)
        return last

    def _wanted_states(self, stream: Stream) -> Stream:
        """What the head reads of the rows whose logits are wanted."""
        last, rows = self._builder.stream(Rows.LOGITS), self._program.input("logits_rows", Rows.LOGITS)
        self._program.op("gather_rows", stream.x, rows, last.x)
        return last
