"""Finding control tokens' texts: the same as an alternation of all of them, the longest first, at a cost that their
number does not multiply."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.protos.text import any_of
from allspan.protos.text.any_of import AnyOf
from allspan.protos.text.tokenizers.control import ControlTexts
from allspan.protos.text.tokenizers.special import SpecialTokens

WORDS = st.lists(st.text("<a|.", min_size=1, max_size=5), max_size=8)


def alternation(texts: list[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@pytest.mark.parametrize(("stretch", "depth"), [(1 << 14, 64), (1, 64), (3, 2), (1 << 14, 0)])
def test_it_finds_what_an_alternation_finds_that_has_the_longest_first(stretch: int, depth: int) -> None:
    @given(WORDS, st.text("<a|.", max_size=40), st.integers(0, 10), st.integers(0, 40))
    def check(texts: list[str], text: str, start: int, end: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(any_of, "STRETCH_CHARS", stretch)
            patch.setattr(any_of, "MAX_DEPTH", depth)
            found = AnyOf(texts)
        assert list(found.spans(text)) == [match.span() for match in alternation(texts).finditer(text)]
        part = min(end, len(text))
        expected = [match.span() for match in alternation(texts).finditer(text, start, part)]
        assert list(found.spans(text, start, part)) == expected
        assert found.are_in(text) == bool(alternation(texts).search(text))

    check()


def test_texts_that_all_begin_alike_nest_no_deeper_than_the_library_compiles() -> None:
    texts = ["a" * length for length in range(1, 500)]
    assert list(AnyOf(texts).spans("a" * 600)) == [(0, 499), (499, 600)]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f"<SPECIAL_{i}>" for i in range(1000)], "<" * 1_000_000),
        ([f"<SPECIAL_{i}>" for i in range(1000)], "<SPECIAL_" * 110_000),
        ([f"<unused{i}>" for i in range(6242)], "<unused" * 28_000),
    ],
)
def test_a_long_text_that_nearly_spells_many_control_tokens_costs_what_another_does(
    names: list[str], text: str
) -> None:
    ids = {name: i for i, name in enumerate(names)}
    control, special = ControlTexts(ids), SpecialTokens(ids, {})
    text += names[-1]
    started = time.process_time()
    assert control.find(text) == [(len(text) - len(names[-1]), len(text))]
    assert special._all._any.are_in(text)
    assert time.process_time() - started < 0.5  # an alternation: several seconds, and no other thread runs
