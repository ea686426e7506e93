"""The choice of a replica, on its own: block keys, what is remembered of a replica, and the order of bids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.client.cluster.affinity import BLOCK_TOKENS, SLACK_TOKENS, Bid, PrefixIndex, block_keys, ranking

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5 * BLOCK_TOKENS)


@given(TOKENS, TOKENS, st.text(max_size=100))
def test_as_many_keys_agree_as_full_blocks_do(first: list[int], second: list[int], salt: str) -> None:
    agreeing = 0
    while agreeing < min(len(first), len(second)) and first[agreeing] == second[agreeing]:
        agreeing += 1
    keys, others = block_keys(first, salt), block_keys(second, salt)
    assert len(keys) == len(first) // BLOCK_TOKENS
    equal = [a == b for a, b in zip(keys, others, strict=False)]
    assert equal == [i < agreeing // BLOCK_TOKENS for i in range(len(equal))]


def test_a_block_after_another_beginning_and_another_salt_have_other_keys() -> None:
    block, other = list(range(BLOCK_TOKENS)), [7] * BLOCK_TOKENS
    assert block_keys([*other, *block])[1] != block_keys([*block, *block])[1]
    assert len({block_keys(block, salt)[0] for salt in ("", "a", "b", "x" * 256, "x" * 255)}) == 5


def test_an_index_finds_the_longest_run_of_leading_blocks() -> None:
    index = PrefixIndex()
    tokens = list(range(4 * BLOCK_TOKENS))
    assert index.match(block_keys(tokens)) == 0
    index.add(block_keys(tokens[: 2 * BLOCK_TOKENS]))
    assert index.match(block_keys(tokens)) == 2
    assert index.match(block_keys(tokens[:40])) == 1
    assert index.match(block_keys([9, *tokens])) == 0
    index.clear()
    assert index.match(block_keys(tokens)) == 0


def test_an_index_is_bounded_and_forgets_what_was_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allspan.client.cluster.affinity.MAX_BLOCKS", 6)
    index = PrefixIndex()
    prompts = [block_keys([i] * 2 * BLOCK_TOKENS) for i in range(4)]
    for keys in prompts[:3]:
        index.add(keys)
    index.add(prompts[0])
    index.add(prompts[3])
    assert len(index) == 6
    assert [index.match(keys) for keys in prompts] == [2, 0, 2, 2]


@pytest.mark.parametrize(
    ("bids", "order"),
    [
        ([Bid(0, 0, 10), Bid(1, 0, 5), Bid(2, 0, 7)], [1, 2, 0]),
        ([Bid(0, 0, 5), Bid(1, 0, 5)], [0, 1]),
        ([Bid(0, 0, 0), Bid(1, 3, 900), Bid(2, 5, 800)], [2, 1, 0]),
        ([Bid(0, 0, 0), Bid(1, 4, SLACK_TOKENS + 4 * BLOCK_TOKENS)], [1, 0]),
        ([Bid(0, 0, 0), Bid(1, 4, SLACK_TOKENS + 4 * BLOCK_TOKENS + 1)], [0, 1]),
        ([Bid(0, 1, 0), Bid(1, 4, 10**6), Bid(2, 0, 0)], [0, 2, 1]),
        ([], []),
    ],
)
def test_hits_go_before_load_unless_the_load_is_far_out_of_balance(bids: list[Bid], order: list[int]) -> None:
    assert [bid.index for bid in ranking(bids)] == order
