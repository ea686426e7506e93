"""What requests may bring beside token ids: an adapter slot, embedding rows in the place of ids, and positions."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allspan.protos.page_keys import rotary_table

POSITION_AXES = ("temporal", "height", "width")
"""The positions of a token in a model with a multimodal rotary embedding."""


class Scorer(Protocol):
    """A model's score head."""

    @property
    def weight(self) -> NDArray[np.float64] | None:
        """[labels, hidden], on the leader."""

    @property
    def generates(self) -> bool:
        """Whether requests may ask for tokens, too."""

    @property
    def num_labels(self) -> int:
        """Scores of a request; 0: the model makes embeddings alone."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What a model's requests may bring beside token ids."""

    num_adapters: int = 0
    """Adapter slots."""
    embedding_size: int = 0
    """Elements of an embedding row; 0: it takes none."""
    hidden_size: int = 0
    """Elements of a hidden state that a request may ask for; 0: it gives none."""
    scorer: Scorer | None = None
    """Makes scores of hidden states; None: the model gives none."""
    num_positions: int = 1
    """Positions of a token: 1, which is its index, or one for each of `POSITION_AXES`."""
    prompt_lengths: tuple[int, ...] = ()
    """The rotary tables are chosen by the length of a request's prompt, for all of its tokens: the longest prompt of
    each table but the last, ascending. Table t begins at row t · max_model_len."""

    def table_of(self, prompt_len: int) -> int:
        """The number of the rotary table of a request with such a prompt."""
        return rotary_table(self.prompt_lengths, prompt_len)


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeddings:
    """Embedding rows of consecutive prompt tokens. The ids in their places say nothing to the model."""

    first: int
    """The position of the first one."""
    rows: NDArray[np.float32]
    """[k, embedding_size]."""
    digest: bytes = field(init=False)
    """128 bits over all of it (BLAKE2b, RFC 7693)."""

    def __post_init__(self) -> None:
        data = struct.pack("<q", self.first) + np.ascontiguousarray(self.rows, dtype=np.float32).tobytes()
        object.__setattr__(self, "digest", hashlib.blake2b(data, digest_size=16).digest())


@dataclass(frozen=True, slots=True, eq=False)
class PromptPositions:
    """The positions of a prompt's tokens. The tokens behind them go on from the largest, alike on every axis."""

    rows: NDArray[np.int32]
    """[axes, prompt tokens], in the order of `POSITION_AXES`."""
    digest: bytes = field(init=False)
    """128 bits over all of it (BLAKE2b, RFC 7693)."""

    def __post_init__(self) -> None:
        data = np.ascontiguousarray(self.rows, dtype=np.int32).tobytes()
        object.__setattr__(self, "digest", hashlib.blake2b(data, digest_size=16, person=b"positions").digest())

    @property
    def following(self) -> int:
        """The position of the first token behind the prompt."""
        return int(self.rows.max()) + 1

    def at(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """[axes, k]: the positions of the tokens with these indices in their request."""
        count = self.rows.shape[1]
        behind = indices - count + self.following
        own: NDArray[np.int64] = self.rows[:, np.minimum(indices, count - 1)].astype(np.int64)
        return np.where(indices < count, own, behind)
