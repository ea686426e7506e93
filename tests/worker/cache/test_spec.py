"""Cache groups: which tokens a query still sees."""

import pytest

from allspan.worker.cache.spec import ALL_TOKENS, PageLifetime


@pytest.mark.parametrize(("window", "position", "first"), [(0, 99, 0), (4, 2, 0), (4, 3, 0), (4, 4, 1), (1, 7, 7)])
def test_a_query_sees_itself_and_the_window_before_it(window: int, position: int, first: int) -> None:
    assert PageLifetime(window).first_seen(position) == first


def test_all_tokens_are_seen_by_default() -> None:
    assert ALL_TOKENS.first_seen(1_000_000) == 0
