"""Tokenizers that lie, explode or panic: refused at load, or a request's error within a bounded time."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text import apart_codec, load_tokenizer
from allspan.protos.text.written import Written
from support.hostile_models import refusals, save_sound

IDS = (-1, 2.5, "x", 10**9, 2**32 - 1, 2**32, 2**60, None, True)
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
DEEP = "[" * 5000 + "]" * 5000
KNOWN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sound(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return values


def split(expression: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, letters]}}


def model(**changes: Any) -> dict[str, Any]:
    vocab = {chr(97 + i): i for i in range(26)}
    return {"model": {"type": "BPE", "vocab": vocab, "merges": []} | changes}


def wrapped(count: int) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}] * count + [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}
    return {
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    }


CHANGES: dict[str, dict[str, Any]] = {
    **{f"token of id {i!r}": model(vocab={"a": i}) for i in IDS},
    **{f"added token of id {i!r}": {"added_tokens": [{"id": i, "content": "<x>", **TOKEN}]} for i in IDS},
    "no model": {"model": None},
    "unknown model": model(type="NoSuch"),
    "vocabulary of a list": model(vocab=[]),
    "merges of what is no token": model(merges=["x y", "nosuch token"]),
    "merges of numbers": model(merges=[[1, 2]]),
    "merges of one": model(merges=["a"]),
    "larger than the model": model(vocab={f"t{i}": i for i in range(300)}),
    "unknown step": {"pre_tokenizer": {"type": "NoSuch"}},
    "step of a number": {"pre_tokenizer": 5},
    "unknown decoder": {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    **{f"expression {e!r}": split(e) for e in ("(((", "[", "*", "(?<n", "\\p{NoSuch}", "(?", "[[:x:", "(?P<a>")},
    "17 tokens before a prompt": wrapped(17),
    "100,000 tokens before a prompt": wrapped(100_000),
    "template without its token": {"post_processor": wrapped(1)["post_processor"] | {"special_tokens": {}}},
    "a charsmap of nothing": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
}
FILES: dict[str, tuple[str, str | bytes]] = {
    **{f"tokenizer of {what}": ("tokenizer.json", text) for what, text in {
        "nothing": "", "a list": "[]", "null": "null", "cut": '{"version": "1.0", "model": {', "deep": DEEP,
        "no UTF-8": b'{"version": "\xff"}', "zeros": bytes(100), "70 MB": b" " * (70 << 20),
    }.items()},
    **{f"config of {what}": ("tokenizer_config.json", text) for what, text in {
        "nothing": "", "a list": "[]", "deep": DEEP, "NaN": '{"a": NaN}', "twice": '{"a": 1, "a": 2}',
        "20 MB": b'{"a": "' + b"x" * (20 << 20) + b'"}',
        "no UTF-8": b'{"a": "\xff"}', "surrogate": '{"bos_token": "\\ud800"}',
    }.items()},
    **{f"added tokens {json.dumps(a)}": ("tokenizer_config.json", json.dumps({"added_tokens_decoder": a})) for a in (
        [], 5, "x", {"x": {"content": "y"}}, {"-1": {"content": "y"}}, {"1e9": {"content": "y"}}, {"256": {}},
        {"256": 5},
        {"256": {"content": 5}}, {"256": {"content": ""}}, {"999999999": {"content": "y"}},
        {str(2**60): {"content": "y"}},
        {"300": {"content": "y"}},
    ) if a},
    **{f"added_tokens.json {json.dumps(a)}": ("added_tokens.json", json.dumps(a)) for a in (
        {"x": "y"}, {"x": -1}, {"x": 2.5}, {"x": 10**9}, {"x": 2**60}, {"x": None}, {"x": True}, {"x": 300}, [],
    )},
    **{f"named tokens {text!r}": ("special_tokens_map.json", text) for text in ("", "[]", "5", "{", DEEP)},
    "template of 2 MB": ("chat_template.jinja", "x" * (2 << 20)),
    "template that is no UTF-8": ("chat_template.jinja", b"\xff\xfe"),
    "template in a list": ("chat_template.json", "[]"),
    "templates of 2 MB": ("tokenizer_config.json", json.dumps({"chat_template": "x" * (2 << 20)})),
}  # fmt: skip
RUNAWAYS = {
    "alternatives": (r"(a|aa)+[cd]", "a" * 200),
    "nested stars": (r"(?:a*)*[cd]", "a" * 3000 + "e"),
    "nested plus": (r"(?:[a-z]+)+[0-9]", "a" * 300),
    "three stars": (r"[a-z]*[a-z]*[a-z]*[a-z]*[0-9]", "a" * 3000),
    "ahead": (r"(?=(a+)+[0-9])a", "a" * 60),
    "behind": (r"(?<=a)(a|aa)+[0-9]", "a" * 200),
    "back reference": (r"(a*)*\1[0-9]x", "a" * 2000),
    "options": (r"(?:a?){40}a{40}[0-9]", "a" * 60),
    "words": (r"(?:\w+\s?)+[!?]", "word " * 100),
    "letters": (r"(?:\p{L}|\p{Ll})+\d", "a" * 200),
    "case": (r"(?i)(?:a|A)+[0-9]", "aA" * 100),
    "spaces": (r"(?:\s|[ \t])+[0-9]", " " * 200),
    "any": (r"(?:.*)*(?:.*)*[\u0000]", "a" * 400),
    "lazy": (r"(?:a+?)+?[0-9]", "a" * 200),
    "sub": (r"(?<x>a|b\g<x>c)+[0-9]", "a" * 400),
    "counted": (r"(?:a{1,50}){1,50}[0-9]", "a" * 200),
    "two ways": (r"(?:ab|a|b)+[0-9]", "ab" * 100),
    "ends": (r"(?:a|aa)+$\d?[^a]", "a" * 200),
    "numbers": (r"(?:\d+)*[a-z]", "1" * 200),
    "emoji": (r"(?:\p{So}|.)+[a]", "😀" * 200),
}


@pytest.mark.parametrize("variant", CHANGES)
def test_a_tokenizer_that_lies_is_refused_by_file(variant: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(sound(folder) | CHANGES[variant]))
    said = refusals(folder)
    assert said
    assert all(str(folder) in line for line in said)


@pytest.mark.parametrize("variant", FILES)
def test_a_file_beside_it_that_lies_is_refused_by_name(variant: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    name, text = FILES[variant]
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusals(folder)
    assert said
    assert all(str(folder) in line for line in said)


def spent() -> float:
    """Seconds of a processor that this process and its ended children have had."""
    return sum(os.times()[:4])


@pytest.mark.parametrize("what", RUNAWAYS)
def test_a_rule_that_runs_away_is_a_requests_error_in_time(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart_codec, "ENCODE_S", 1.0)
    expression, text = RUNAWAYS[what]
    folder = save_sound(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(sound(folder) | split(expression)))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.is_apart
    for hello in ("hello, world", Written("hello, world")):
        assert tokenizer.decode(tokenizer.encode(hello)) == "hello, world"
    started = spent()
    with suppress(InvalidRequest):  # some of these the library refuses by itself, some it can do
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert spent() - started < 20.0
    assert tokenizer.encode("abc") == tokenizer.codec.encode_framed("abc") == [97, 98, 99]


def test_known_rules_encode_here(tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    assert not load_tokenizer(folder).is_apart
    (folder / "tokenizer.json").write_text(json.dumps(sound(folder) | split(KNOWN)))
    assert not load_tokenizer(folder).is_apart


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**6}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "aa"}] * 50}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|aa)+[cd]"}, "content": ""}},
    ],
)
def test_a_normaliser_that_lets_texts_grow_encodes_apart(change: dict[str, Any], tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(sound(folder) | change))
    assert load_tokenizer(folder).is_apart


def test_an_expression_cannot_hide_behind_escapes(tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    text = json.dumps(sound(folder) | split("((("))
    (folder / "tokenizer.json").write_text(text.replace('"Regex"', '"R\\u0065gex"'))
    (said,) = refusals(folder)
    assert "cannot be read: Oniguruma error" in said
