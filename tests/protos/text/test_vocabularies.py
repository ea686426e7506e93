"""Whether two models mean the same by a token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from allspan.protos.text.vocabularies import first_difference

WORDS = ["<unk>", "a", "b", "c", "é", "</s>"]


def folder(place: Path, words: list[str], control: str = "</s>") -> Path:
    place.mkdir()
    added = {"content": control, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "model": model, "added_tokens": [added | {"id": 5, "normalized": False}]}
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    return place


@pytest.mark.parametrize(
    ("words", "control", "difference"),
    [
        (WORDS, "</s>", ""),
        ([*WORDS, "more"], "</s>", ""),
        ([*WORDS[:5], "<end>"], "<end>", ""),
        (["<unk>", "a", "c", "b", *WORDS[4:]], "</s>", "token 2 is ' b' and ' c'"),
        ([*WORDS[:4], "è", "</s>"], "</s>", "token 4 is ' é' and ' è'"),
    ],
)
def test_the_first_other_text_is_named(tmp_path: Path, words: list[str], control: str, difference: str) -> None:
    one, other = folder(tmp_path / "one", WORDS), folder(tmp_path / "other", words, control)
    assert first_difference(one, other) == difference
    shutil.rmtree(other)
    shutil.copytree(one, other)
    assert not first_difference(one, other)
