"""Stop strings against a search in the whole text."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from allspan.protos.text import StopStrings

stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def in_whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, found by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def in_pieces(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        safe, matched = matcher.push(piece)
        shown += safe
        assert "".join(pieces).startswith(shown)
        if matched is not None:
            assert matcher.push("more") == ("", matched)
            assert matcher.finish() == ""
            return shown, matched
    return shown + matcher.finish(), None


@settings(max_examples=1000)
@example(["abba", "bb"], ["a", "b", "b"])
@example(["abba", "bb"], ["abbc"])
@example(["aab"], ["a", "a", "a", "b"])
@given(stop_lists, st.lists(st.text("abc", max_size=6), max_size=12))
def test_pieces_give_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert in_pieces(pieces, stops) == in_whole("".join(pieces), stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["\n\nUser:", "</s>"])
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("\nYou") == ("\n\nYou", None)
    assert matcher.push(" <") == (" ", None)
    assert matcher.push("/p></s") == ("</p>", None)
    assert matcher.push(">ignored") == ("", "</s>")


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopStrings([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""
