"""What the layers of draft heads begin with: those of EAGLE-3 (Li et al., arXiv:2503.01840) and those of multi-token
prediction (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.pieces import Axis, Linear, Part, Piece, Vector
from allspan.worker.program.program import Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from allspan.worker.models.sublayer import Stream, StreamBuilder
    from allspan.worker.program.program import Slot


class PairGqa(Gqa):
    """Grouped-query attention whose queries, keys and values are made of two states of a token, side by side."""

    __slots__ = ()

    def _qkv(self, prefix: str, hidden: Axis) -> Linear:
        return super()._qkv(prefix, Axis(2 * hidden.size))


@dataclass(frozen=True, slots=True)
class FusedFeatures:
    """A DraftInput: EAGLE-3's. A product makes one state of several of the target's; attention reads it beside the
    embedding, both normed. Weights: fc, embedding_norm, state_norm, and with `norms_features` features_norm."""

    num_features: int
    """Elements of a token's features, of all states together."""
    eps: float
    keeps_normed: bool
    """The residual stream begins with the normed state, not with the state."""
    norms_features: bool = False
    """Features go through an RMSNorm of all states together first."""

    @property
    def tells_states_apart(self) -> bool:
        return True

    def width(self, hidden: int, is_chained: bool) -> int:
        return hidden if is_chained else self.num_features

    def pieces(self, hidden: Axis) -> tuple[Piece, ...]:
        features = Axis(self.num_features)
        norm = (Vector("features_norm.weight", features),) if self.norms_features else ()
        return (*norm, _fc(hidden, features), *_norms(hidden))

    def emit(self, builder: StreamBuilder, stream: Stream, given: Slot, is_chained: bool) -> Slot | None:
        program, hidden = builder.program, builder.holding.spec.hidden_size

        def state() -> None:
            if is_chained:
                program.op("put_columns", given, 0, stream.residual)
                return
            if self.norms_features:
                program.op("rms_norm", given, program.named("features_norm.weight"), self.eps, given)
            builder.holding.emit(program, _fc(Axis(hidden), Axis(self.num_features)), given, stream.residual)

        pair = _pair(builder, stream, state, self.eps)
        if self.keeps_normed:
            program.op("put_columns", stream.x, 0, stream.residual)
        return pair


@dataclass(frozen=True, slots=True)
class ProjectedPair:
    """A DraftInput: that of multi-token prediction. A product makes the residual stream of the embedding and the state
    beside it, both normed. Weights: eh_proj, embedding_norm and state_norm."""

    eps: float

    @property
    def tells_states_apart(self) -> bool:
        return False

    def width(self, hidden: int, is_chained: bool) -> int:
        return hidden

    def pieces(self, hidden: Axis) -> tuple[Piece, ...]:
        return (*_norms(hidden), _eh_proj(hidden))

    def emit(self, builder: StreamBuilder, stream: Stream, given: Slot, is_chained: bool) -> Slot | None:
        program, hidden = builder.program, Axis(builder.holding.spec.hidden_size)

        def state() -> None:
            program.op("put_columns", given, 0, stream.residual)

        pair = _pair(builder, stream, state, self.eps)
        builder.holding.emit(program, _eh_proj(hidden), pair, stream.residual)
        return None


def _pair(builder: StreamBuilder, stream: Stream, state: Callable[[], None], eps: float) -> Slot:
    """Appends the ops to [normed embedding, normed state]; `state` appends those from what is given to the
    residual stream, which holds the embedding before."""
    program, hidden = builder.program, builder.holding.spec.hidden_size
    pair = builder.buffer("pair", Rows.TOKENS, 2 * hidden)
    for place, name in enumerate(("embedding_norm.weight", "state_norm.weight")):
        if place:
            state()
        program.op("rms_norm", stream.residual, program.named(name), eps, stream.x)
        program.op("put_columns", stream.x, place * hidden, pair)
    return pair


def _norms(hidden: Axis) -> tuple[Piece, ...]:
    return Vector("embedding_norm.weight", hidden), Vector("state_norm.weight", hidden)


def _fc(hidden: Axis, features: Axis) -> Linear:
    """Every rank has all of it: a sum over the ranks takes longer than so small a product."""
    return Linear("fc", (Part("fc", hidden),), features)


def _eh_proj(hidden: Axis) -> Linear:
    """Every rank has all of it, too."""
    return Linear("eh_proj", (Part("eh_proj", hidden),), Axis(2 * hidden.size))
