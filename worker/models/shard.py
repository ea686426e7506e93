"""Which part of a model one rank holds. Splits are contiguous and as even as they go; the first ranks get one more."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from allspan.worker.models.pieces import ATTENTION, EP, ETP, PP, TP, Axis


def split(total: int, size: int) -> tuple[range, ...]:
    """`total` items over `size` ranks: 9 over 2 is 0..5 and 5..9."""
    each, more = divmod(total, size)
    starts = [rank * each + min(rank, more) for rank in range(size + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


@dataclass(frozen=True, slots=True)
class Place:
    """A rank within a process group."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


WHOLE = Place(0, 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part: its number among those that share its layers, and its place in each process group."""

    rank: int
    size: int
    groups: Mapping[str, Place]

    def units(self, axis: Axis) -> range:
        """This rank's units (heads, columns, experts) along a dimension."""
        if not axis.group:
            return range(axis.count)
        place = self.groups[axis.group]
        if not axis.readers:
            return split(axis.count, place.size)[place.rank]
        run, readers = axis.readers // axis.count, split(axis.readers, place.size)[place.rank]
        return range(readers.start // run, -(-readers.stop // run)) if readers else range(0)

    @property
    def stage(self) -> Place:
        """The place of its layers in the pipeline."""
        return self.groups.get(PP, WHOLE)

    @property
    def attends_apart(self) -> bool:
        """Whether each rank has all heads, for the tokens of its own requests alone (data-parallel attention)."""
        return self.size > 1 and self.groups[ATTENTION].size == 1

    def layers(self, count: int) -> range:
        """This rank's layers of a model that has `count`."""
        return split(count, self.stage.size)[self.stage.rank]

    def part(self, axis: Axis) -> range:
        """This rank's elements along a dimension."""
        units = self.units(axis)
        return range(units.start * axis.unit, units.stop * axis.unit)


def make_shard(
    rank: int, size: int, stage: Place = WHOLE, expert_groups: int = 1, attends_apart: bool = False
) -> Shard:
    """One of `size` ranks that share all that is split of the layers of a stage. Of `expert_groups`, neighbouring ranks
    each, every one has whole experts of its own, whose columns its ranks share out: 1 slices every expert over all
    ranks, `size` slices none. `attends_apart`: every rank has all heads. Raises ValueError unless the groups are
    equal."""
    if size % expert_groups:
        raise ValueError(f"{size} ranks are not {expert_groups} equal groups")
    slices = size // expert_groups
    experts, columns = Place(rank // slices, expert_groups), Place(rank % slices, slices)
    every, heads = Place(rank, size), WHOLE if attends_apart else Place(rank, size)
    return Shard(rank, size, {TP: every, ATTENTION: heads, EP: experts, ETP: columns, PP: stage})
