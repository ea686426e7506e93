"""Which group of ranks holds which experts: as they are numbered, or balanced by DeepSeek's published rule (EPLB).

The rule: experts get the spare places as copies, each the one that has most tokens a copy; copies then go from the
heaviest to the lightest to the group of ranks with least that has a place left. Where the router takes experts in
groups and these can be shared out equally, nodes first get whole groups, by the same packing, and each node then
balances what it has by itself: a token's choices lie on few nodes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.worker.models.shard import split

MOST_TABLE_ROWS = 120
"""Rows of `Placement.table` at most: all numbers of copies up to 6, and many above, divide it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts that each group of ranks holds, by place; the first groups may have a place more."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def copies(self) -> tuple[int, ...]:
        """How many places hold each expert."""
        held = Counter(expert for group in self.groups for expert in group)
        return tuple(held[expert] for expert in range(len(held)))

    def tokens(self, load: Sequence[float]) -> tuple[float, ...]:
        """Each group's tokens, where `load` are those of each expert, which its copies share equally."""
        each = [tokens / copies for tokens, copies in zip(load, self.copies, strict=True)]
        return tuple(math.fsum(each[expert] for expert in group) for group in self.groups)

    def table(self, group: int, rows: int) -> Tensor:
        """int32 [rows, E]: the place where this group holds the copy of an expert that a token takes whose experts'
        numbers add up to the row's number; -1 where another group holds it. See `OpSet.route`."""
        places: list[list[tuple[int, int]]] = [[] for _ in self.copies]
        for number, experts in enumerate(self.groups):
            for place, expert in enumerate(experts):
                places[expert].append((number, place))
        table = torch.full((rows, len(places)), -1, dtype=torch.int32)
        for expert, copies in enumerate(places):
            for number, (owner, place) in enumerate(copies):
                if owner == group:
                    table[number :: len(copies), expert] = place
        return table

    def moved_from(self, old: Placement, nodes: int = 1) -> Placement:
        """The same groups of experts, given to the ranks that hold most of them already, each expert where it lies: so
        that little has to be moved. Groups stay on their nodes, and keep their numbers where they have another
        size."""
        chosen: dict[int, tuple[int, ...]] = {}
        left = list(range(len(self.groups)))
        node_of = [number * nodes // len(self.groups) for number in left]
        for held, node in zip(old.groups, node_of, strict=True):
            fitting = [number for number in left if node_of[number] == node and len(self.groups[number]) == len(held)]
            best = max(fitting, key=lambda number: (_common(self.groups[number], held), -number))
            left.remove(best)
            chosen[len(chosen)] = _in_place(self.groups[best], held)
        return Placement(tuple(chosen.values()))


def table_rows(placement: Placement) -> int:
    """The rows of tables, as many for all placements with so many places: an expert's copies then get equally many
    tokens."""
    groups, num_redundant = len(placement.groups), sum(map(len, placement.groups)) - len(placement.copies)
    return min(math.lcm(*range(1, min(groups, num_redundant + 1) + 1)), MOST_TABLE_ROWS)


def numbered(num_experts: int, groups: int, num_redundant: int = 0) -> Placement:
    """Experts in the order of their numbers, and after the last one the first ones again, as copies."""
    places = split(num_experts + num_redundant, groups)
    return Placement(tuple(tuple(place % num_experts for place in own) for own in places))


def balanced(
    load: Sequence[float], groups: int, num_redundant: int = 0, nodes: int = 1, expert_groups: int = 1
) -> Placement:
    """The placement of the rule for experts with these tokens; on one node `numbered`'s where that is no worse. `nodes`
    have equally many neighbouring groups of ranks, the router `expert_groups` of neighbouring experts; where these, or
    the places, cannot be shared out equally, the rule is that of one node.

    Raises ValueError for copies that no group of ranks has a place for beside another one of the same expert.
    """
    experts, places = len(load), len(load) + num_redundant
    if not 0 <= num_redundant <= experts * (groups - 1):
        raise ValueError(f"{num_redundant} copies of {experts} experts do not fit {groups} groups of ranks")
    is_uneven = experts % expert_groups or expert_groups % nodes or groups % nodes or places % groups
    if is_uneven or num_redundant > experts * (groups // nodes - 1):
        nodes = 1
    of_nodes = _of_nodes(load, nodes, expert_groups) if nodes > 1 else [list(range(experts))]
    capacities, of_ranks = [len(own) for own in split(places, groups)], groups // nodes
    found: list[tuple[int, ...]] = []
    for node, own in enumerate(of_nodes):
        room = capacities[node * of_ranks : (node + 1) * of_ranks]
        copied = _copied(load, own, sum(room), of_ranks)
        copies = Counter(copied)
        found += _packed([load[expert] / copies[expert] for expert in copied], copied, room)
    rule, plain = Placement(tuple(found)), numbered(experts, groups, num_redundant)
    return rule if nodes > 1 else min(plain, rule, key=lambda placement: max(placement.tokens(load)))


def _of_nodes(load: Sequence[float], nodes: int, expert_groups: int) -> list[list[int]]:
    """Each node's experts: whole groups of them."""
    each = len(load) // expert_groups
    sums = [math.fsum(load[group * each : (group + 1) * each]) for group in range(expert_groups)]
    packs = _packed(sums, range(expert_groups), [expert_groups // nodes] * nodes)
    return [[group * each + i for group in pack for i in range(each)] for pack in packs]


def _copied(load: Sequence[float], experts: Sequence[int], places: int, most: int) -> list[int]:
    """Every expert, and again with each place more the one with most tokens a copy of those with fewer than `most`
    copies."""
    found = list(experts)
    heaviest = [(-load[expert], expert, 1) for expert in experts if most > 1]
    heapq.heapify(heaviest)
    while len(found) < places:
        _, expert, copies = heapq.heappop(heaviest)
        found.append(expert)
        if copies + 1 < most:
            heapq.heappush(heaviest, (-load[expert] / (copies + 1), expert, copies + 1))
    return found


def _packed(load: Sequence[float], names: Iterable[int], capacities: Sequence[int]) -> list[tuple[int, ...]]:
    """The names in packs of these sizes: from the heaviest, each to the lightest pack with a place; a pack takes a name
    twice only where no other has a place."""
    packs: list[list[int]] = [[] for _ in capacities]
    weights = [0.0] * len(capacities)
    for weight, name in sorted(zip(load, names, strict=True), key=lambda item: (-item[0], item[1])):
        free = [pack for pack, most in enumerate(capacities) if len(packs[pack]) < most]
        best = min(free, key=lambda pack: (name in packs[pack], weights[pack], pack))
        packs[best].append(name)
        weights[best] += weight
    return [tuple(sorted(pack)) for pack in packs]


def _common(group: Sequence[int], other: Sequence[int]) -> int:
    return sum(min(group.count(expert), other.count(expert)) for expert in set(group))


def _in_place(group: Sequence[int], held: Sequence[int]) -> tuple[int, ...]:
    """The group's experts, those that are held where they lie."""
    new = list(group)
    stays: list[bool] = []
    for expert in held:
        stays.append(expert in new)
        if stays[-1]:
            new.remove(expert)
    return tuple(expert if stay else new.pop(0) for expert, stay in zip(held, stays, strict=True))
