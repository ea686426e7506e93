"""Text of a request as its outputs come: characters, special tokens, and stop strings across the borders of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.results import Output, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text.stream.text_stream import TextDelta, TextStream
from support.byte_tokenizer import byte_tokenizer


def push_all(stream: TextStream, text: str, sizes: Iterable[int], reason: str = "length") -> list[TextDelta]:
    """The text's bytes as outputs of so many tokens, the last one with the finish reason."""
    data = list(text.encode())
    deltas = []
    for size in sizes:
        piece, data = data[:size], data[size:]
        deltas.append(stream.push(Output(tuple(piece), finish_reason="" if data else reason)))
    assert not data
    return deltas


def test_half_a_character_waits_for_its_rest() -> None:
    stream = TextStream(byte_tokenizer(), SamplingParams())
    deltas = push_all(stream, "aé€!", [2, 1, 2, 2])
    assert [delta.text for delta in deltas] == ["a", "é", "", "€!"]
    assert [delta.finish_reason for delta in deltas] == ["", "", "", "length"]


def test_an_output_that_ends_within_a_character_shows_that() -> None:
    stream = TextStream(byte_tokenizer(), SamplingParams())
    assert stream.push(Output((0xE2, 0x82), finish_reason="length")).text == "\ufffd"


def test_the_token_that_ended_the_output_is_no_text() -> None:
    stream = TextStream(byte_tokenizer(), SamplingParams())
    delta = stream.push(Output(tuple(b"hi!"), finish_reason="stop", stop_token_id=ord("!")))
    assert (delta.text, delta.token_ids, delta.stop) == ("hi", tuple(b"hi!"), ord("!"))


def test_special_tokens_are_no_text() -> None:
    stream = TextStream(byte_tokenizer(frozenset({7})), SamplingParams())
    assert stream.push(Output((ord("a"), 7, ord("b")))).text == "ab"


@pytest.mark.parametrize("sizes", [[11], [1] * 11, [4, 4, 3], [6, 5], [7, 4]])
def test_text_and_tokens_are_cut_at_the_stop_string_however_outputs_were_merged(sizes: list[int]) -> None:
    stream = TextStream(byte_tokenizer(), SamplingParams(stop=("END",)))
    deltas = push_all(stream, "one ENDmore", sizes)
    assert "".join(delta.text for delta in deltas) == "one "
    assert bytes(token for delta in deltas for token in delta.token_ids) == b"one END"
    (last,) = [delta for delta in deltas if delta.finished]
    assert (last.finish_reason, last.stop) == ("stop", "END")


def test_what_may_begin_a_stop_string_is_held_back_and_then_let_go() -> None:
    stream = TextStream(byte_tokenizer(), SamplingParams(stop=("END",)))
    assert [delta.text for delta in push_all(stream, "aENbE", [3, 1, 1])] == ["a", "ENb", "E"]


def test_only_an_output_that_goes_on_has_to_be_stopped() -> None:
    going_on = TextStream(byte_tokenizer(), SamplingParams(stop=("x",)))
    ended = TextStream(byte_tokenizer(), SamplingParams(stop=("x",)))
    assert going_on.push(Output(tuple(b"ax"))).stopped_early
    delta = ended.push(Output(tuple(b"ax"), finish_reason="length"))
    assert not delta.stopped_early
    assert delta.finish_reason == "stop"


def test_logprobs_are_cut_with_their_tokens() -> None:
    stream = TextStream(byte_tokenizer(), SamplingParams(stop=("b",), logprobs=0))
    delta = stream.push(Output(tuple(b"abc"), tuple(TokenLogprob(-float(i)) for i in range(3))))
    assert [entry.logprob for entry in delta.logprobs] == [0.0, -1.0]


def test_nothing_comes_after_the_end() -> None:
    stream = TextStream(byte_tokenizer(), SamplingParams(stop=("b",)))
    stream.push(Output(tuple(b"ab")))
    assert stream.push(Output(tuple(b"cd"), finish_reason="length")) == TextDelta("", (), ())


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    delta = TextStream(None, SamplingParams()).push(Output((1, 2), finish_reason="length"))
    assert (delta.text, delta.token_ids) == ("", (1, 2))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        TextStream(None, SamplingParams(stop=("x",)))
