"""PageIndex: which replicas have which pages, by the pages' keys."""

from __future__ import annotations

from collections.abc import Iterable


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

    def match(self, keys: Iterable[int], among: int) -> list[tuple[int, int]]:
        """Numbers of leading pages, ascending, each with the mask of the replicas that have that many and no more;
        replicas that have none are left out. Keys are read while a replica of the mask `among` has all before."""
        found: list[tuple[int, int]] = []
        left, holders, count = among, self._holders, 0
        for key in keys:
            still = left & holders.get(key, 0)
            if still != left:
                if count:
                    found.append((count, left & ~still))
                left = still
                if not left:
                    return found
            count += 1
        if count and left:
            found.append((count, left))
        return found
