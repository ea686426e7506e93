"""Pages are free, used or cached; held as often as they were taken, and found by their keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.page_pool import PagePool

actions = st.lists(
    st.tuples(st.sampled_from(["allocate", "acquire", "release", "insert", "evict", "forget"]), st.integers(0, 20)),
    max_size=60,
)


@given(st.integers(1, 12), actions)
def test_free_used_and_cached_pages_are_all_there_are(total, actions):
    pool = PagePool(total)
    holds: list[int] = []
    keys: dict[bytes, int] = {}
    for kind, number in actions:
        page = holds[number % len(holds)] if holds else None
        key = bytes([number])
        if kind == "allocate" and number <= pool.num_free:
            pages = pool.allocate(number)
            assert not set(pages) & set(holds)
            holds += pages
        elif kind == "acquire" and (found := pool.find(key)) is not None:
            pool.acquire(found)
            holds.append(found)
        elif kind == "release" and page is not None:
            pool.release([page])
            holds.remove(page)
        elif kind == "insert" and page is not None and page not in keys.values():
            pool.insert(key, page)
            keys.setdefault(key, page)
        elif kind == "evict" and pool.num_cached:
            evicted, gone = pool.evict()
            assert evicted not in holds
            assert keys.pop(gone) == evicted
        elif kind == "forget" and number == 0:
            pool.forget_keys()
            keys.clear()
        pool.check()
        assert pool.num_free + pool.num_used + pool.num_cached == total
        assert pool.num_used == len(set(holds))
        assert {key: pool.find(key) for key in keys} == keys
        assert all(pool.references(page) == holds.count(page) for page in range(total))


def cached(total, count):
    """A pool whose first pages are cached under their own numbers."""
    pool = PagePool(total)
    pages = pool.allocate(count)
    for page in pages:
        pool.insert(bytes([page]), page)
    pool.release(reversed(pages))
    return pool


def test_what_was_given_back_first_is_given_up_first():
    pool = cached(4, 3)
    assert [pool.evict()[0] for _ in range(3)] == [2, 1, 0]


def test_using_a_page_makes_it_the_last_to_go():
    pool = cached(4, 3)
    pool.acquire(2)
    pool.release([2])
    pool.touch(1)
    assert [pool.evict()[0] for _ in range(3)] == [0, 2, 1]


def test_of_two_pages_for_one_key_the_first_is_kept():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.insert(b"key", first)
    pool.insert(b"key", second)
    assert pool.find(b"key") == first
    pool.release([second, first])
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_pages_in_use_are_free_once_given_back_when_their_keys_were_forgotten():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.insert(b"key", pages[0])
    pool.forget_keys()
    pool.release(pages)
    assert (pool.num_free, pool.find(b"key")) == (3, None)


def test_more_than_is_free_is_refused():
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(InternalError, match="2 pages asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


@pytest.mark.parametrize("pages", [(0, 0), (1,), (0, 1), (7,), (-1,)])
def test_releasing_what_nobody_holds_is_refused_and_changes_nothing(pages):
    pool = PagePool(3)
    assert pool.allocate(1) == (0,)
    with pytest.raises(InternalError):
        pool.release(pages)
    assert pool.num_used == 1
    pool.check()


def test_a_page_cannot_be_released_more_often_than_it_was_taken():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.acquire(*pages)
    pool.release(pages)
    pool.release(pages)
    with pytest.raises(InternalError, match="is released, but is not held"):
        pool.release(pages)


def test_a_free_page_can_neither_be_acquired_nor_get_a_key():
    pool = PagePool(2)
    with pytest.raises(InternalError, match="it is free"):
        pool.acquire(0)
    with pytest.raises(InternalError, match="not in use"):
        pool.insert(b"key", 0)


def test_an_empty_pool_is_refused():
    with pytest.raises(InternalError, match="0 pages"):
        PagePool(0)


def test_books_that_do_not_add_up_are_told():
    pool = PagePool(3)
    pool._free.append(1)
    with pytest.raises(InternalError, match="listed twice"):
        pool.check()
