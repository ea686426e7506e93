"""Ranked vocabularies: merges by rank as tiktoken has them, Tekken's files, and files that lie."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.api.errors import CheckpointError
from allspan.protos.text import load_tokenizer
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.protos.text.vendors.ranks import MAX_RANKED_BYTES, RankedVocabulary, read_tekken, read_tiktoken
from support import vendor_folders

LETTERS = [bytes([byte]) for byte in range(256)]
TOKENS = [b"bc", b"ab", b"abc", b"abcd", b"cd", b"bcbc", b" a", b"aa", b"aaa", b"xyz"]
"""`xyz` cannot be merged; it is a token where it is a whole word."""


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path_factory.mktemp("home")))


def tekken(**changes: Any) -> bytes:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate([*LETTERS, *TOKENS])]
    config = {"pattern": r"\p{L}+|\P{L}", "default_num_special_tokens": 5, "default_vocab_size": 269}
    return json.dumps({"config": config, "vocab": vocab, **changes}).encode()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = vendor_folders.qwen(tmp_path_factory.mktemp("m") / "m")
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate([*LETTERS, *TOKENS])]
    (folder / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLSPAN_HOME", str(folder))
        return load_tokenizer(folder)


def merged(word: bytes) -> list[int]:
    """The ids of a word, by the definition: a token as it is, else the union of lowest rank first."""
    ranks = {token: rank for rank, token in enumerate([*LETTERS, *TOKENS])}
    parts = [word] if word in ranks else [word[i : i + 1] for i in range(len(word))]
    while True:
        unions = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not unions:
            return [ranks[part] for part in parts]
        _, at = min(unions)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=300, deadline=None)
@given(st.text("abcdxyz", min_size=1, max_size=12))
def test_words_are_merged_by_rank(qwen: Tokenizer, word: str) -> None:
    assert qwen.codec.encode(word, False) == merged(word.encode())


def test_characters_are_composed_and_numbers_cut(qwen: Tokenizer) -> None:
    assert qwen.encode("e\u0301") == [*"é".encode()]
    assert qwen.encode("12") == [*b"12"]
    assert qwen.encode("xyz xyz") == [265, 32, *b"xyz"]
    assert qwen.decode(qwen.encode("🦙 abc\n")) == "🦙 abc\n"


def test_special_tokens_follow_the_ranks(qwen: Tokenizer) -> None:
    assert qwen.encode("<|endoftext|><|extra_204|>") == [266, 266 + 3 + 204]
    assert qwen.vocab_size == 266 + 208


def test_the_vocabulary_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = vendor_folders.glm4(tmp_path / "m")
    ids = load_tokenizer(folder).encode("hello 123")

    def never(self: RankedVocabulary, source: str) -> bytes:
        raise AssertionError(source)

    monkeypatch.setattr(RankedVocabulary, "tokenizer_json", never)
    assert load_tokenizer(folder).encode("hello 123") == ids


def test_tekken_has_its_special_tokens_first(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(tekken())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 269}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abc[INST]") == [1, 263, 3]
    assert tokenizer.decode([1, 263, 3]) == "abc"
    named = [{"rank": 4, "token_str": "[X]"}]
    (tmp_path / "tekken.json").write_bytes(tekken(special_tokens=named))
    assert load_tokenizer(tmp_path).encode("[X]<SPECIAL_0>a") == [4, 0, 102]
    assert len(read_tekken(tekken(), "t").ranks) == 264  # the last two are beyond default_vocab_size


LINE = b"YWI= 256"
BAD = {
    "nothing": b"",
    "no rank": b"YWI=",
    "two spaces": b"YWI=  256",
    "a negative rank": b"YWI= -1",
    "a long rank": b"YWI= 9999999999",
    "a rank beyond all": b"YWI= 99999999",
    "no base64": b"Y$ 256",
    "an empty token": b" 256",
    "a token twice": LINE + b"\n" + LINE,
    "rubbish": bytes(range(11, 256)),
}
BAD_TEKKEN = {
    "no config": {"config": None},
    "no pattern": {"config": {"default_num_special_tokens": 5, "default_vocab_size": 269}},
    "no vocab": {"vocab": {}},
    "a vocabulary of numbers": {"vocab": [1] * 300},
    "another rank": {"vocab": [{"rank": 5, "token_bytes": "YQ=="}] * 300},
    "a small vocabulary": {"vocab": []},
    "special tokens of a number": {"special_tokens": 5},
    "a special token beyond": {"special_tokens": [{"rank": 5, "token_str": "x"}]},
    "a special token twice": {"special_tokens": [{"rank": i, "token_str": "x"} for i in (0, 1)]},
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_list_of_ranks_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^some\.tiktoken"):
        read_tiktoken(BAD[name], "some.tiktoken")


@pytest.mark.parametrize(
    ("line", "message"), [(b"enp6 97", "the rank 97 twice"), (b"enp6 257", "no token of rank 256")]
)
def test_ranks_are_the_numbers_from_0_on_each_once(line: bytes, message: str) -> None:
    whole = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(LETTERS))
    assert len(read_tiktoken(whole, "some.tiktoken")) == 256
    with pytest.raises(CheckpointError, match=f"^some.tiktoken has {message}, must have each from 0 to 256 once"):
        read_tiktoken(whole + line, "some.tiktoken")


@pytest.mark.parametrize("name", BAD_TEKKEN)
def test_a_tekken_file_that_lies_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^some\.json"):
        read_tekken(tekken(**BAD_TEKKEN[name]), "some.json")


def test_tokens_that_cost_too_much_or_miss_a_byte_are_refused() -> None:
    letters = {token: rank for rank, token in enumerate(LETTERS)}
    for ranks in (
        {**letters, b"a" * (MAX_RANKED_BYTES + 1): 256},
        {**letters, **{b"%01000d" % i: 256 + i for i in range(100)}},
        {token: rank for token, rank in letters.items() if rank},
    ):
        with pytest.raises(CheckpointError, match=r"^some\.tiktoken has "):
            RankedVocabulary(ranks, {}, "a").tokenizer_json("some.tiktoken")
    with pytest.raises(CheckpointError, match="has the id of another token"):
        RankedVocabulary(letters, {"<s>": 7}, "a").tokenizer_json("some.tiktoken")


def test_an_expression_that_runs_away_is_refused_or_encodes_apart(tmp_path: Path) -> None:
    values = json.loads(tekken())
    values["config"]["pattern"] = r"(?:\w+\s?)+[!?]"
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path).is_apart
    values["config"]["pattern"] = "((("
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)
