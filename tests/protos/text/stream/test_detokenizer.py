"""Incremental text equals the whole, and never shows half a character."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.protos.text import Detokenizer, Tokenizer, load_tokenizer
from support.gguf_files import CONTROL, SPACE, USER_DEFINED, G, byte_level_gguf, sentencepiece_gguf
from support.hf_folders import byte_level, sentencepiece_like

KINDS = ("gguf-bytes", "gguf-sentencepiece", "folder-bytes", "folder-sentencepiece")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    special = {"<s>": CONTROL, "<tool>": USER_DEFINED}
    pieces = {SPACE: -9.0, f"{SPACE}a": -1.0, "a": -8.0, f"{SPACE}{SPACE}": -2.0, "界": -3.0}
    return {
        "gguf-bytes": load_tokenizer(byte_level_gguf(root / "b.gguf", [f"{G} {G}", "h e", "ð Ł"], special)),
        "gguf-sentencepiece": load_tokenizer(sentencepiece_gguf(root / "s.gguf", pieces, {"<tool>": USER_DEFINED})),
        "folder-bytes": load_tokenizer(byte_level(root / "bytes")),
        "folder-sentencepiece": load_tokenizer(sentencepiece_like(root / "pieces")),
    }


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts = []
    for size in sizes:
        parts.append(ids[:size])
        ids = ids[size:]
    return [*parts, ids]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_deltas_of_random_ids_make_the_whole_text(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip)
    deltas = [detokenizer.push(part) for part in cut(ids, data.draw(st.lists(st.integers(0, 4), max_size=20)))]
    assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(st.text())
def test_random_text_comes_in_whole_characters(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    expected = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert expected.startswith(shown)
    assert detokenizer.finish() == ""
    assert shown == expected


@pytest.mark.parametrize("kind", KINDS)
@given(st.text("ab é界🦙\n", max_size=30))
def test_text_survives_the_round_trip(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    assert tokenizers[kind].decode(tokenizers[kind].encode(text)) == text


def test_a_character_of_four_tokens_appears_with_the_last(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["folder-sentencepiece"]
    ids = [3 + byte for byte in "🦙".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "🦙"]


def test_an_output_that_ends_within_a_character_shows_one_replacement(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["gguf-bytes"])
    assert detokenizer.push([ord("a"), 0xF0, 0x9F]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_text_do_not_hold_up_what_follows(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["gguf-bytes"])
    assert detokenizer.push([0xFF, ord("b")]) == "\ufffdb"


def test_the_first_space_of_sentencepiece_goes_unless_the_text_continues(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gguf-sentencepiece"]
    a = tokenizer.encode("a", add_special_tokens=False)
    assert Detokenizer(tokenizer).push(a + a) == "a a"
    assert Detokenizer(tokenizer, continues=True).push(a + a) == " a a"
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(part) for part in ([1], [], a, a)] == ["", "", "a", " a"]


def test_the_cost_of_a_token_does_not_grow_with_the_output(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["gguf-bytes"])

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            detokenizer.push([0xFF])  # never a valid character
        return time.perf_counter() - begin

    seconds(1000)
    early = min(seconds(2000) for _ in range(3))
    seconds(50_000)
    assert min(seconds(2000) for _ in range(3)) < 10 * early
