"""Keys, matches, and what moves between the tiers."""

import pytest

from allspan.protos.api.errors import InternalError
from allspan.protos.page_keys import page_keys, root_key
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.prefix_cache import Match, PrefixCache

ROOT = root_key("model", 1, "", "")


def chain(*pages):
    return page_keys(ROOT, [token for tokens in pages for token in tokens], 2)


A, B = chain([1, 2], [3, 4], [5, 6]), chain([1, 2], [9, 9], [5, 6])


def filled(cache, keys):
    """A request of these pages came, computed them and went."""
    match = cache.match(keys)
    pages = cache.take(match, len(keys))
    for key, page in list(zip(keys, pages, strict=True))[match.num_pages :]:
        cache.insert(key, page)
    cache.release(pages)
    cache.check()
    return pages


def test_a_key_stands_for_everything_before_it():
    assert len({ROOT, *A, *B}) == 1 + 3 + 2
    assert A[0] == B[0]
    assert all(len(key) == 16 for key in A)
    others = [root_key("model", 2, "", ""), root_key("other", 1, "", ""), root_key("model", 1, "a", ""), ROOT]
    assert len({page_keys(root, [1, 2], 2)[0] for root in (*others, root_key("model", 1, "", "a"))}) == 5


def test_a_page_that_is_not_full_has_no_key_and_the_chain_can_be_taken_up():
    assert page_keys(ROOT, [1, 2, 3], 2) == A[:1]
    assert page_keys(A[0], [3, 4, 5, 6, 7], 2) == A[1:]
    assert page_keys(ROOT, [], 2) == []


def test_the_longest_beginning_is_found():
    cache = PrefixCache(8)
    pages = filled(cache, A)
    assert cache.match(A).pages == [(page, False) for page in pages]
    assert cache.match(B).pages == [(pages[0], False)]
    assert cache.match(chain([7, 7])).pages == []


def test_the_end_of_a_sequence_is_given_up_before_its_beginning():
    cache = PrefixCache(3)
    pages = filled(cache, A)
    assert cache.allocate(2) == (pages[1], pages[2])
    assert cache.match(A).num_pages == 1


def test_pages_of_a_match_are_not_given_up_for_its_own_request():
    cache = PrefixCache(4)
    filled(cache, A)
    match = cache.match(A)
    assert cache.fits(match, 4, 0)
    assert not cache.fits(match, 4, 1)
    assert not cache.fits(match, 5, 0)
    assert cache.take(match, 4)[:3] == [page for page, _ in match.pages]


def test_what_the_device_gives_up_is_saved_and_comes_back():
    cache = PrefixCache(3, 2)
    pages = filled(cache, A)
    taken = cache.allocate(3)
    saves, loads = cache.take_copies()
    assert [copy.source for copy in saves] == [pages[2], pages[1], pages[0]]
    assert loads == ()
    assert cache.match(A).num_pages == 2, "the host has two places: the tail went first"
    cache.release(taken)
    match = cache.match(A)
    assert match.num_host_pages == 2
    again = cache.take(match, 3)
    saves, loads = cache.take_copies()
    assert saves == ()
    assert loads == tuple(Copy(page, target) for (page, _), target in zip(match.pages, again, strict=False))
    cache.check()
    cache.settle()
    cache.release(again)
    assert cache.match(A).pages[0] == (again[0], False)


def test_a_host_page_that_is_being_read_is_not_written_by_the_same_plan():
    cache = PrefixCache(2, 1)
    filled(cache, A[:1])
    cache.release(cache.allocate(2))
    filled(cache, chain([8, 8])[:1])
    cache.take_copies()
    match = cache.match(A[:1])
    assert match.pages == [(0, True)]
    pages = cache.take(match, 2)
    saves, loads = cache.take_copies()
    assert len(loads) == 1
    assert saves == (), "the page that made room found the only host page taken"
    cache.check()
    cache.settle()
    cache.release(pages)
    cache.check()


def test_what_the_host_has_is_not_saved_again():
    cache = PrefixCache(2, 4)
    filled(cache, A[:2])
    cache.release(cache.allocate(2))
    pages = cache.take(cache.match(A[:2]), 2)
    cache.settle()
    cache.release(pages)
    cache.take_copies()
    cache.allocate(2)
    assert cache.take_copies() == ((), ())


def test_who_computes_a_page_is_known_until_it_is_there_or_given_up():
    cache = PrefixCache(4)
    first, second = object(), object()
    cache.announce(A, first)
    cache.announce(A[:1], second)
    assert cache.owner(A[0]) is first
    (page,) = cache.take(Match(()), 1)
    cache.insert(A[0], page)
    assert cache.owner(A[0]) is None
    cache.withdraw(A, second)
    assert cache.owners() == {id(first)}
    cache.withdraw(A, first)
    assert cache.owners() == set()


def test_a_reset_forgets_both_tiers_and_counts_up():
    cache = PrefixCache(3, 3)
    filled(cache, A)
    cache.release(cache.allocate(2))
    cache.reset()
    assert (cache.device.num_free, cache.host.num_free, cache.generation) == (3, 3, 1)
    assert cache.match(A).pages == []


def test_too_many_pages_are_refused():
    cache = PrefixCache(2)
    with pytest.raises(InternalError, match="3 pages asked for"):
        cache.allocate(3)
