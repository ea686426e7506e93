"""Rows that begin with the same pages stand together, and are looked at when somebody joins."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from allspan.worker.step.shared_prefix import SharedPages

PAGE = 4


def test_rows_are_brought_together_by_their_first_whole_pages() -> None:
    pages = np.array([[7, 2, 9], [3, 8, 5], [7, 2, 4], [1, 0, 0], [7, 6, 0], [3, 8, 5]], np.int32)
    shared = SharedPages(pages, PAGE)
    order, common = shared.of((0, 1, 2, 3, 4, 5), np.array([11, 12, 10, 3, 8, 11]))
    assert common is not None
    found = dict(zip(order.tolist(), common.tolist(), strict=True))
    at = order.tolist().index
    assert abs(at(0) - at(2)) == abs(at(1) - at(5)) == 1
    assert sorted(found.values()) == [0, 0, 0, 4, 8, 8], "the page that a row is filling is not whole"


def test_the_same_rows_are_not_looked_at_again_until_somebody_joins() -> None:
    pages = np.array([[5, 1], [5, 2], [6, 3]], np.int32)
    shared, computed = SharedPages(pages, PAGE), np.array([8, 8, 8])
    _, first = shared.of((0, 1, 2), computed)
    assert shared.of((0, 1, 2), computed)[1] is first
    pages[2, 0] = 5
    assert shared.of((0, 1, 2), computed)[1] is first
    shared.forget()
    _, common = shared.of((0, 1, 2), computed)
    assert common is not None
    assert common.tolist() == [4, 4, 0]


def test_nothing_is_found_where_nothing_is_shared() -> None:
    shared = SharedPages(np.array([[5, 1], [6, 1]], np.int32), PAGE)
    order, common = shared.of((1, 0), np.array([8, 8]))
    assert (order.tolist(), common) == ([1, 0], None)
    shared.forget()
    assert shared.of((0, 1), np.array([3, 3]))[1] is None


def test_a_short_row_does_not_part_those_beside_it_when_it_leaves() -> None:
    shared = SharedPages(np.array([[5, 6], [5, 6], [5, 6]], np.int32), PAGE)
    computed = np.array([4, 3, 4])
    shared.of((0, 1, 2), computed)
    order, common = shared.of((0, 2), computed)
    assert common is not None
    assert (sorted(order.tolist()), common.tolist()) == ([0, 2], [4, 0])


rows = st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=9)


@given(rows, st.data())
def test_where_rows_have_left_the_others_share_what_they_did(table: list[list[int]], data: st.DataObject) -> None:
    computed = np.array([data.draw(st.integers(0, 6 * PAGE)) for _ in table])
    shared = SharedPages(np.array(table, np.int32), PAGE)
    names = tuple(range(len(table)))
    shared.of(names, computed)
    kept = tuple(data.draw(st.sets(st.sampled_from(names), min_size=1)))
    order, common = shared.of(kept, computed)
    assert sorted(order.tolist()) == sorted(kept)
    seen = [0] * len(kept) if common is None else common.tolist()
    for row, following, tokens in zip(order[:-1], order[1:], seen, strict=False):
        whole = min(computed[row], computed[following]) // PAGE
        alike = [a == b for a, b in zip(table[row][:whole], table[following][:whole], strict=True)]
        assert tokens == PAGE * (alike.index(False) if False in alike else whole)
    assert seen[-1] == 0
