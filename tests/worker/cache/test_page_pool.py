"""Pages are handed out once, and taken back once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.protos.errors import InternalError
from allspan.worker.cache.page_pool import PagePool


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=50))
def test_no_page_is_held_twice_and_none_is_lost(total, actions):
    pool = PagePool(total)
    held = []
    for takes, count in actions:
        if takes and count <= pool.num_free:
            pages = pool.allocate(count)
            assert len(pages) == count
            held.extend(pages)
        elif not takes:
            pool.release(held[:count])
            del held[:count]
        pool.check()
        assert len(set(held)) == len(held) == pool.num_used == total - pool.num_free
        assert all(0 <= page < total for page in held)


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


def test_a_page_cannot_be_released_twice():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(InternalError, match="nobody holds it"):
        pool.release(pages)


def test_an_empty_pool_is_refused():
    with pytest.raises(InternalError, match="0 pages"):
        PagePool(0)
