"""Prefix affinity: a request goes to the replica that has most of its prompt in the prefix cache, unless it is far too
busy.

What a replica holds is not asked but remembered: the blocks of what was sent there. A wrong guess costs a prefill.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 32
MAX_KEYS = 512
"""Most blocks of one request that are looked up: its first 16,384 tokens decide."""
MAX_BLOCKS = 65536
"""Most blocks remembered for one replica, two million tokens; the least recently used are dropped first."""
SLACK_TOKENS = 2048
"""Load by which one replica may exceed another before that outweighs a hit: four steps of the default token budget."""


def block_keys(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """A key for each full block of the leading tokens, chained: equal keys have equal tokens before them, too."""
    key = salt.encode()
    keys = []
    for start in range(0, min(len(tokens) // BLOCK_TOKENS, MAX_KEYS) * BLOCK_TOKENS, BLOCK_TOKENS):
        block = array("I", tokens[start : start + BLOCK_TOKENS]).tobytes()
        key = blake2b(block, digest_size=16, key=key if len(key) <= 64 else blake2b(key).digest()).digest()
        keys.append(key)
    return keys


class PrefixIndex:
    """The blocks that one replica has seen, up to MAX_BLOCKS."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading blocks that are in the index."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the first blocks, which more prompts share, leave last
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


@dataclass(frozen=True, slots=True)
class Bid:
    """A replica's values for routing: `hit_blocks` of the prompt in its prefix cache, and `load` tokens that wait there
    already."""

    index: int
    hit_blocks: int
    load: int


def ranking(bids: Sequence[Bid]) -> list[Bid]:
    """The longest hit first, and of equals the least load. A hit counts for nothing at a replica that has more to do
    than the least busy one by more than what the hit saves plus SLACK_TOKENS."""
    least = min((bid.load for bid in bids), default=0)

    def order(bid: Bid) -> tuple[int, int, int]:
        is_overloaded = bid.load - least > SLACK_TOKENS + bid.hit_blocks * BLOCK_TOKENS
        return (0 if is_overloaded else -bid.hit_blocks, bid.load, bid.index)

    return sorted(bids, key=order)
