"""What the page log tells readers is what the cache holds, however late they read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos import worker_pb2 as pb
from allspan.protos.page_keys import page_keys, root_key, short_key
from allspan.worker.cache.page_log import PageLog
from allspan.worker.cache.prefix_cache import PrefixCache
from allspan.worker.service.leader_news import LeaderNews, PageEventStream
from support.fake_core import FakeCore

SIZE = 2
ROOT = root_key("model", 1)


class Cache:
    """A prefix cache with a log, and requests that come, compute all their pages and go."""

    def __init__(self, num_pages: int = 6, num_host_pages: int = 3) -> None:
        self.cache = PrefixCache(num_pages, num_host_pages)
        self.log = self.cache.log = PageLog(SIZE)

    def run(self, tokens: list[int], adapter: int = -1) -> None:
        keys = page_keys(ROOT, tokens, SIZE)
        match = self.cache.match(keys)
        pages = self.cache.take(match, len(keys))
        first = match.num_pages
        self.log.describe(keys, first, tokens[first * SIZE :], adapter)
        for key, page in zip(keys[first:], pages[first:], strict=True):
            self.cache.insert(key, page)
        self.log.described()
        self.cache.release(pages)
        self.cache.take_copies()
        self.cache.settle()

    def reset(self) -> None:
        self.cache.reset()
        self.log.clear(2)

    @property
    def truth(self) -> dict[int, str]:
        host = {} if self.cache.host is None else self.cache.host._page_of
        return {short_key(key): "CPU" for key in host} | {short_key(key): "GPU" for key in self.cache.device._page_of}


class Follower:
    """Keeps a picture of the cache from the messages alone."""

    def __init__(self, log: PageLog, with_tokens: bool = True) -> None:
        self.stream = PageEventStream(log, (), with_tokens)
        self.pages: dict[int, pb.PageStored] = {}
        self.snapshots = 0
        self._next = 0

    def read(self) -> bool:
        message = self.stream.next()
        if message is None:
            return False
        assert message.sequence == self._next
        self._next += 1
        if message.cleared:
            self.snapshots += 1
            self.pages.clear()
        for key in message.removed:
            self.pages.pop(key, None)
        self.pages.update((page.key, page) for page in message.stored)
        return True

    @property
    def media(self) -> dict[int, str]:
        return {key: page.medium for key, page in self.pages.items()}


prompts = st.builds(
    lambda family, length, tail: [family] * length + tail,
    st.integers(1, 3),
    st.sampled_from([8, 6, 4, 2]),
    st.lists(st.integers(4, 6), max_size=4),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("run"), prompts),
        st.tuples(st.just("run"), prompts),
        st.tuples(st.just("read"), st.integers(0, 1)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.sampled_from([0, 2, 5]), st.integers(1, 5), st.sampled_from([4, 8, 1000]))
def test_who_has_read_everything_knows_the_cache(
    steps: list[tuple[str, object]], host_pages: int, most: int, kept: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allspan.worker.service.leader_news.MAX_PAGES", most)
        patch.setattr("allspan.worker.cache.page_log.MAX_CHANGES", kept)
        cache = Cache(num_host_pages=host_pages)
        followers = [Follower(cache.log), Follower(cache.log, with_tokens=False)]
        for what, value in steps:
            if what == "run":
                cache.run(list(value))  # type: ignore[call-overload]
            elif what == "read":
                followers[int(value)].read()  # type: ignore[call-overload]
            else:
                cache.reset()
            assert len(cache.log) == len(cache.truth)
            assert len(cache.log._changes) <= kept
        for follower in followers:
            while follower.read():
                pass
            assert follower.media == cache.truth
        told = followers[0].pages
        for key, page in told.items():  # the key is that of the tokens told, after those of the parents told
            if page.parent == 0:
                assert short_key(page_keys(ROOT, list(page.token_ids), SIZE)[0]) == key
        assert all(not page.token_ids for page in followers[1].pages.values())


def test_nothing_is_kept_for_nobody_and_late_readers_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(20)
    cache.run([1] * 8)
    assert not cache.log._changes
    follower = Follower(cache.log)
    while follower.read():
        pass
    monkeypatch.setattr("allspan.worker.cache.page_log.MAX_CHANGES", 4)
    for i in range(2, 9):
        cache.run([i] * 6)
    assert len(cache.log._changes) == 4
    while follower.read():
        pass
    assert (follower.snapshots, follower.media) == (2, cache.truth)
    follower.stream.close()
    assert not cache.log._changes


def test_a_page_comes_with_its_tokens_and_the_page_before_it() -> None:
    cache = Cache(4, 0)
    cache.run([1, 2, 3, 4])
    first, second = (short_key(key) for key in page_keys(ROOT, [1, 2, 3, 4], SIZE))
    follower = Follower(cache.log)
    follower.read()
    told = [(page.key, page.parent, list(page.token_ids), page.medium) for page in follower.pages.values()]
    assert told == [(first, 0, [1, 2], "GPU"), (second, first, [3, 4], "GPU")]


def test_a_page_comes_with_the_number_of_its_adapter_whatever_tier_it_is_in() -> None:
    cache = Cache(2, 2)
    cache.run([1] * 4, adapter=0)
    follower = Follower(cache.log)
    follower.read()
    assert [(page.medium, page.lora_id) for page in follower.pages.values()] == [("GPU", 1)] * 2
    cache.run([2] * 4)
    follower.read()
    assert (
        sorted((page.medium, page.lora_id) for page in follower.pages.values()) == [("CPU", 1)] * 2 + [("GPU", 0)] * 2
    )


def test_a_page_is_taken_back_before_its_place_holds_another() -> None:
    cache = Cache(2, 0)
    cache.run([1] * 4)
    reader = cache.log.open()
    reader.take(100)
    cache.run([2] * 4)
    changes = reader.log.since(reader._position, 100)
    assert changes is not None
    assert [page is None for _, page in changes] == [True, True, False, False]


def test_the_load_is_told_with_the_first_message_and_not_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    news = LeaderNews(FakeCore().load)
    first, second, third = pb.StepOutputs(), pb.StepOutputs(), pb.StepOutputs()
    news.add_to(first)
    news.add_to(second)
    assert (first.load.queued_tokens, first.load.running, second.HasField("load")) == (300, 1, False)
    monkeypatch.setattr("allspan.worker.service.leader_news.LOAD_S", 0.0)
    news.add_to(third)
    assert third.load.cached_pages == 5
