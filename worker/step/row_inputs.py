"""What requests may bring beside token ids: an adapter slot, and embedding rows in the place of ids."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What a model's requests may bring beside token ids."""

    num_adapters: int = 0
    """Adapter slots."""
    embedding_size: int = 0
    """Elements of an embedding row; 0: it takes none."""
    hidden_size: int = 0
    """Elements of a hidden state that a request may ask for; 0: it gives none."""


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
