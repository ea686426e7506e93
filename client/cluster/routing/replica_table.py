"""ReplicaTable: what a decision reads of all replicas, kept as arrays and bit masks that change when a replica does."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from allspan.client.cluster.routing.page_index import PageIndex
from allspan.protos.page_keys import PageShape

Numbers = NDArray[np.intp]
Loads = NDArray[np.float64]


class ReplicaTable:
    """Loads and pages of all replicas, by their numbers. In a mask, bit n is replica n."""

    def __init__(self, count: int) -> None:
        self.index = PageIndex()
        self.loads: Loads = np.zeros(count)
        """Tokens that a replica has to compute. Means nothing for one in `untold`."""
        self.untold = (1 << count) - 1
        """Replicas whose leader has told no load."""
        self.members: dict[PageShape, int] = {}
        """The replicas whose pages are of a shape; no shape has none."""

    def reshape(self, number: int, before: PageShape | None, after: PageShape) -> None:
        """The replica's pages are of another shape."""
        bit = 1 << number
        if before is not None:
            left = self.members[before] & ~bit
            if left:
                self.members[before] = left
            else:
                del self.members[before]
        self.members[after] = self.members.get(after, 0) | bit

    def tell_load(self, number: int, tokens: float | None) -> None:
        """Sets what the replica has to compute; None: it is not known."""
        if tokens is None:
            self.untold |= 1 << number
        else:
            self.untold &= ~(1 << number)
            self.loads[number] = tokens


@lru_cache(maxsize=256)
def numbers_in(mask: int) -> Numbers:
    """The numbers of the bits that are set, ascending; not to be changed."""
    data = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), np.uint8)
    found: Numbers = np.unpackbits(data, bitorder="little").nonzero()[0]
    return found
