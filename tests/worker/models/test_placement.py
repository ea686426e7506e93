"""Which ranks hold which experts: every one has a place, places are equal, and loads are balanced as the rule says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.worker.models.placement import Placement, balanced, numbered, table_rows

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


def check(placement: Placement, experts: int, groups: int, num_redundant: int) -> None:
    sizes = [len(group) for group in placement.groups]
    assert len(sizes) == groups
    assert sum(sizes) == experts + num_redundant
    assert max(sizes) - min(sizes) <= 1
    assert len(placement.copies) == experts
    assert min(placement.copies) >= 1


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(1, 9), st.integers(0, 20), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_every_expert_has_a_place_and_no_rank_more_than_without_the_rule(
    load: list[int], groups: int, num_redundant: int, nodes: int, expert_groups: int
) -> None:
    experts = len(load)
    groups, num_redundant = min(groups, experts), min(num_redundant, experts * (min(groups, experts) - 1))
    placement = balanced(load, groups, num_redundant, nodes, expert_groups)
    check(placement, experts, groups, num_redundant)
    assert sum(placement.tokens(load)) == pytest.approx(sum(load))
    plain = numbered(experts, groups, num_redundant)
    check(plain, experts, groups, num_redundant)
    if nodes == 1:
        assert max(placement.tokens(load)) <= max(plain.tokens(load))
        assert max(placement.copies) <= groups


@settings(max_examples=40, deadline=None)
@given(LOADS, LOADS, st.integers(1, 6), st.integers(0, 8))
def test_what_stays_on_a_rank_keeps_its_place(
    load: list[int], other: list[int], groups: int, num_redundant: int
) -> None:
    experts = min(len(load), len(other))
    groups = min(groups, experts)
    num_redundant = min(num_redundant, experts * (groups - 1))
    old, new = (balanced(each[:experts], groups, num_redundant) for each in (load, other))
    moved = new.moved_from(old)
    check(moved, experts, groups, num_redundant)
    assert max(moved.tokens(other[:experts])) == pytest.approx(max(new.tokens(other[:experts])))
    for held, before in zip(moved.groups, old.groups, strict=True):
        stays = sum((Counter(held) & Counter(before)).values())
        assert stays == sum(expert == was for expert, was in zip(held, before, strict=True))
    assert old.moved_from(old) == old


PUBLISHED = [
    (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        ((5, 6), (5, 7), (4, 8), (3, 4), (9, 10), (2, 10), (0, 1), (1, 11)),
    ),
    (
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ((7, 10), (6, 8), (6, 11), (8, 9), (2, 4), (1, 5), (0, 5), (1, 3)),
    ),
]
"""The example that comes with the rule: twelve experts in four groups, sixteen places on eight GPUs of two nodes."""


@pytest.mark.parametrize(("load", "groups"), PUBLISHED)
def test_the_published_example_has_its_published_placement(
    load: list[int], groups: tuple[tuple[int, ...], ...]
) -> None:
    placement = balanced(load, 8, 4, nodes=2, expert_groups=4)
    assert placement.groups == groups
    anywhere = balanced(load, 8, 4)
    assert sorted(anywhere.copies) == sorted(placement.copies)
    moved = placement.moved_from(Placement(groups[4:] + groups[:4]), nodes=2)
    assert sorted(moved.groups[:4]) == sorted(groups[:4])
    assert max(anywhere.tokens(load)) <= max(placement.tokens(load))


def test_copies_that_no_rank_could_use_are_refused() -> None:
    with pytest.raises(ValueError, match="5 copies of 4 experts do not fit 2 groups"):
        balanced([1.0] * 4, 2, 5)


@pytest.mark.parametrize("num_redundant", [0, 3, 8])
def test_tables_give_each_sum_of_experts_one_copy_of_every_expert_on_one_rank(num_redundant: int) -> None:
    load, groups = [50, 1, 1, 9, 9, 30, 2, 2], 4
    placement = balanced(load, groups, num_redundant)
    rows = table_rows(placement)
    tables = [placement.table(group, rows) for group in range(groups)]
    for row in range(rows):
        for expert in range(8):
            owners = [(group, int(table[row, expert])) for group, table in enumerate(tables) if table[row, expert] >= 0]
            ((group, place),) = owners
            assert placement.groups[group][place] == expert
    of_hottest = [count for table in tables if (count := int((table[:, 0] >= 0).sum()))]
    assert len(of_hottest) == placement.copies[0]
    assert set(of_hottest) == {rows // placement.copies[0]}, "copies of an expert get equally many sums"
