"""PageIndex: which replicas have which pages, by the pages' keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PageIndex:
    """The pages of all replicas; a replica is a bit of an integer."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica: int, keys: Iterable[int]) -> None:
        """The replica has these pages."""
        bit, holders = 1 << replica, self._holders
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def discard(self, replica: int, keys: Iterable[int]) -> None:
        """The replica has these pages no more."""
        bit, holders = 1 << replica, self._holders
        for key in keys:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def match(self, keys: Sequence[int], among: int) -> dict[int, int]:
        """The number of leading pages of each replica whose bit is in `among`, those with none left out."""
        found: dict[int, int] = {}
        left, holders = among, self._holders
        for count, key in enumerate(keys):
            still = left & holders.get(key, 0)
            if still != left:
                if count:
                    found.update((replica, count) for replica in _bits(left & ~still))
                left = still
                if not left:
                    return found
        if keys:
            found.update((replica, len(keys)) for replica in _bits(left))
        return found


def _bits(mask: int) -> Iterable[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
