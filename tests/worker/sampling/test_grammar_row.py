"""A row of a grammar over a scripted matcher: tokens may only count up by one, and the text is whole after three."""

from __future__ import annotations

import numpy as np
import pytest

from allspan.kernels.abi.sampling import ALL_MASKED
from allspan.worker.sampling.failure import GRAMMAR_ENDED, GRAMMAR_FAILED
from allspan.worker.sampling.grammar import (
    FIRST_ALLOWANCE_S,
    TOKEN_ALLOWANCE_S,
    Allowance,
    GrammarRow,
    MatcherFailed,
    OutputMatcher,
    SeenMasks,
    Words,
    mask_of,
)

VOCABULARY, END, PROMPT_LEN = 64, 60, 2


class Counting:
    """Meets `Matcher`. The output is 1, 2, 3; `most`: tokens after which this matcher fails."""

    def __init__(self, most: int = 100) -> None:
        self.read: list[int] = []
        self._most = most

    def consume(self, token_ids: list[int]) -> None:
        self.read += token_ids
        if len(self.read) > self._most or self.read != list(range(1, len(self.read) + 1)):
            raise MatcherFailed(f"{self.read} was read")

    def accepts(self, token_ids: list[int]) -> int:
        after = range(len(self.read) + 1, 4)
        agreed = [token == wanted for token, wanted in zip(token_ids, after, strict=False)]
        return agreed.index(False) if False in agreed else len(agreed)

    def forced(self) -> list[int]:
        return list(range(len(self.read) + 1, 4))

    def rollback(self, count: int) -> None:
        if count > len(self.read):
            raise MatcherFailed(f"{count} tokens are more than were read")
        del self.read[len(self.read) - count :]

    def fill(self, mask: Words) -> bool:
        count = len(self.read)
        mask[:] = mask_of([count + 1] if count < 3 else [], VOCABULARY)
        return count == 3


class Grammar:
    """Meets `CompiledGrammar`; its shared matchers fail after `most` tokens."""

    def __init__(self, most: int = 100) -> None:
        self.made: list[Counting] = []
        self._most = most

    def matcher(self) -> Counting:
        self.made.append(Counting(self._most))
        return self.made[-1]

    def own_matcher(self) -> Counting:
        self.made.append(Counting())
        return self.made[-1]


def tokens_of(*output: int) -> Words:
    return np.array([9] * PROMPT_LEN + list(output) + [0] * (8 - len(output)), dtype=np.int32)


def allowed(mask: Words) -> list[int]:
    return [token for token in range(VOCABULARY) if mask[token // 32] >> (token % 32) & 1]


def filled(matcher: OutputMatcher, position: int) -> list[int]:
    mask = np.zeros(VOCABULARY // 32, dtype=np.int32)
    matcher.fill(position, mask)
    return allowed(mask)


def test_a_matcher_reads_only_what_is_new_however_many_steps_it_has_missed() -> None:
    grammar = Grammar()
    matcher = OutputMatcher(grammar, tokens_of(1, 2, 3), PROMPT_LEN)
    assert filled(matcher, PROMPT_LEN) == [1]
    assert filled(matcher, PROMPT_LEN + 2) == [3]
    assert grammar.made[0].read == [1, 2]


def test_drafts_that_the_grammar_accepts_are_read_and_rolled_back() -> None:
    grammar, tokens = Grammar(), tokens_of(1, 2, 7)
    matcher = OutputMatcher(grammar, tokens, PROMPT_LEN)
    matcher.begin_drafts(PROMPT_LEN + 1)
    assert filled(matcher, PROMPT_LEN + 2) == [3]
    assert filled(matcher, PROMPT_LEN + 3) == []
    matcher.retract(PROMPT_LEN + 1)
    assert grammar.made[0].read == [1]
    assert filled(matcher, PROMPT_LEN + 1) == [2]


def test_a_shared_matcher_that_fails_is_replaced_once_by_one_that_begins_anew() -> None:
    grammar = Grammar(most=1)
    matcher = OutputMatcher(grammar, tokens_of(1, 2, 9), PROMPT_LEN)
    assert filled(matcher, PROMPT_LEN + 2) == [3]
    assert [made.read for made in grammar.made] == [[1, 2], [1, 2]]
    with pytest.raises(MatcherFailed, match=r"\[1, 2, 9\] was read"):
        filled(matcher, PROMPT_LEN + 3)
    assert len(grammar.made) == 2


def test_masks_that_take_too_long_in_all_are_refused() -> None:
    allowance = Allowance()
    assert allowance.spend(FIRST_ALLOWANCE_S, 0) == ""
    assert allowance.spend(TOKEN_ALLOWANCE_S, 1) == ""
    assert "of a processor" in allowance.spend(TOKEN_ALLOWANCE_S, 1)


@pytest.mark.parametrize("on_host", [True, False])
def test_an_end_may_be_sampled_where_the_text_is_whole_and_nowhere_else(on_host: bool) -> None:
    row = GrammarRow(Grammar(), tokens_of(1, 2, 3), PROMPT_LEN, [END], SeenMasks(VOCABULARY), on_host=on_host)
    for position, tokens in ((PROMPT_LEN + 2, [3]), (PROMPT_LEN + 3, [END])):
        assert allowed(row.mask(position)) == tokens
        logits = np.zeros(VOCABULARY, dtype=np.float32)
        row.apply(position, logits)
        assert np.flatnonzero(logits == 0).tolist() == tokens


@pytest.mark.parametrize(
    ("output", "first_end", "verdict"),
    [((1, 2, 3), 0, GRAMMAR_ENDED), ((1, 2, 3), 20, ALL_MASKED), ((1, 2), 0, ALL_MASKED), ((5,), 0, GRAMMAR_FAILED)],
)
def test_the_verdict_says_why_nothing_is_left(output: tuple[int, ...], first_end: int, verdict: int) -> None:
    row = GrammarRow(Grammar(), tokens_of(*output), PROMPT_LEN, [], SeenMasks(VOCABULARY), first_end)
    row.make(PROMPT_LEN + len(output))
    assert row.verdict == verdict


class Brittle(Counting):
    """Takes any token for one of its language, and fails at the first that is none."""

    def accepts(self, token_ids: list[int]) -> int:
        return len(token_ids)


class BrittleGrammar(Grammar):
    def matcher(self) -> Counting:
        return Brittle()

    own_matcher = matcher


@pytest.mark.parametrize(("kept", "verdict"), [(0, ALL_MASKED), (1, GRAMMAR_FAILED)])
def test_a_matcher_that_fails_behind_a_draft_fails_the_row_only_where_that_is_kept(kept: int, verdict: int) -> None:
    tokens = tokens_of(1, 7)
    row = GrammarRow(BrittleGrammar(), tokens, PROMPT_LEN, [], SeenMasks(VOCABULARY))
    row.begin_drafts(PROMPT_LEN + 1)
    assert [allowed(row.mask(PROMPT_LEN + count)) for count in (1, 2)] == [[2], []]
    row.retract(PROMPT_LEN + 1 + kept)
    if not kept:
        tokens[PROMPT_LEN + 1] = 2
    assert allowed(row.mask(PROMPT_LEN + 2)) == ([] if kept else [3])
    assert row.verdict == verdict
