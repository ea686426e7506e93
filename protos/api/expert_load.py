"""ExpertLoad: how a layer's tokens are spread over its experts, and over the groups of ranks that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How many tokens chose each expert of a layer since the ranks started; a token counts for all that it chooses."""

    layer: int
    tokens: tuple[int, ...]
    """Each expert's tokens, whichever rank holds it."""
    groups: tuple[float, ...] = ()
    """The tokens of each group of ranks that hold the same experts; copies of an expert share its tokens equally."""

    @property
    def choices(self) -> int:
        return sum(self.tokens)

    @property
    def hottest(self) -> int:
        """Returns the expert with most tokens, between equal ones the lowest."""
        return self.tokens.index(max(self.tokens))

    @property
    def hottest_share(self) -> float:
        """Returns the share of all choices that went to the hottest expert; 0 before the first token."""
        return max(self.tokens) / (self.choices or 1)

    @property
    def imbalance(self) -> float:
        """Returns the load of the busiest group of ranks over the mean one: 1 where all have the same."""
        total = sum(self.groups)
        return max(self.groups) * len(self.groups) / total if total else 1.0


def added(loads: Iterable[ExpertLoad]) -> tuple[ExpertLoad, ...]:
    """Returns one load a layer, in order of layers: the sums of those that are given."""
    by_layer: dict[int, list[ExpertLoad]] = defaultdict(list)
    for load in loads:
        by_layer[load.layer].append(load)
    return tuple(
        ExpertLoad(
            layer,
            tuple(map(sum, zip(*(load.tokens for load in same), strict=True))),
            tuple(map(sum, zip(*(load.groups for load in same), strict=True))),
        )
        for layer, same in sorted(by_layer.items())
    )
