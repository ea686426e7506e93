"""What a block of a layer is to the decoder. A block is a frozen dataclass: its fields are the whole of it, so that a
converted model's manifest can hold it (`allspan.worker.models.blocks.table`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from allspan.worker.cache.spec import PageLifetime
from allspan.worker.models.pieces import Axis, Piece

if TYPE_CHECKING:
    from allspan.worker.models.sublayer import Stream, StreamBuilder, Sublayer
    from allspan.worker.program.program import Slot


class AttentionBlock(Protocol):
    """Mixes the tokens of each request, and keeps their keys and values in the pages of its layer. Layers with equal
    pages and lifetimes are a cache group."""

    @property
    def lifetime(self) -> PageLifetime:
        """How long a request keeps the pages of its layer."""
        ...

    @property
    def heads(self) -> Axis:
        """Query heads. No more ranks than these can share the model."""
        ...

    @property
    def kv_heads(self) -> Axis:
        """What a page holds of each token: so many heads of so many elements, for keys and for values."""
        ...

    @property
    def is_latent(self) -> bool:
        """Whether the keys and the values of a token are made of the same elements: a page has them once."""
        ...

    @property
    def latent_sizes(self) -> tuple[int, int] | None:
        """Where `is_latent`: of a token's elements those that keys and values are made of, and those that turn."""
        ...

    def pieces(self, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
        """Its weights, in the order in which they are read; canonical names begin with `prefix`."""
        ...

    def mix(self, sub: Sublayer, x: Slot) -> Slot:
        """Appends the ops from x [n, hidden] to what every token gets of the others, and returns its buffer."""
        ...

    def project(self, sub: Sublayer, attended: Slot) -> None:
        """Appends the ops from (some rows of) that buffer to the residual stream; they look at each row alone."""
        ...


class MlpBlock(Protocol):
    """Computes each row alone."""

    def pieces(self, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
        """See `AttentionBlock.pieces`."""
        ...

    def emit(self, sub: Sublayer, x: Slot) -> None:
        """Appends the ops from x [rows, hidden] to the residual stream."""
        ...


class DraftInput(Protocol):
    """Makes what the layers of a draft head begin with: of a token's embedding, and of what is known of the token
    before it. That is the features of its target; or where the head drafts on behind its own draft, its own state
    (`allspan.worker.models.spec.HeadSpec`)."""

    @property
    def tells_states_apart(self) -> bool:
        """Whether features of the target go through other ops than the head's own states."""
        ...

    def width(self, hidden: int, is_chained: bool) -> int:
        """Elements that are given of a token: of its features, or of the head's own state."""
        ...

    def pieces(self, hidden: Axis) -> tuple[Piece, ...]:
        """Its weights, in the order in which they are read."""
        ...

    def emit(self, builder: StreamBuilder, stream: Stream, given: Slot, is_chained: bool) -> Slot | None:
        """Appends the ops from the embedding, which lies in the residual stream, and from what is `given` [n, width] to
        the residual stream. Returns what the first attention block reads, where that is not the normed residual stream.
        `is_chained`: what is given are the head's own states."""
        ...
