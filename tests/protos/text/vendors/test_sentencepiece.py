"""SentencePiece models: the ids of their own library, and files that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import CheckpointError
from allspan.protos.text import Detokenizer, load_tokenizer
from allspan.protos.text.vendors.sentencepiece_codec import SentencePieceCodec
from allspan.protos.text.vendors.sentencepiece_model import parse_model
from support import vendor_folders
from support.sentencepiece_files import (
    BYTES,
    CONTROL,
    NORMAL,
    START,
    UNUSED,
    USER_DEFINED,
    merged,
    message,
    model,
    number,
    piece,
    variants,
    varint,
)

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "sentencepiece_vectors.json").read_text())
A = ("a", -1.0, NORMAL)
BAD = {
    "nothing": b"",
    "cut": model([*START, A])[:-3],
    "cut inside a number": model([*START, A]) + b"\x12\xff",
    "a number without end": model([*START, A]) + b"\xff" * 100,
    "a field longer than the file": model([*START, A]) + varint(1 << 3 | 2) + varint(2**60),
    "a group": model([*START, A]) + bytes([1 << 3 | 3]),
    "a piece that is a number": model([*START, A]) + number(1, 5),
    "settings that are a number": model([*START, A]) + number(2, 5),
    "an empty piece": piece("") + model(START),
    "a long piece": model([*START, ("x" * 70_000, 0.0, NORMAL)]),
    "no UTF-8": model(START) + piece(b"\xff"),
    "a score that is no number": model([*START, ("a", float("nan"), NORMAL)]),
    "an endless score": model([*START, ("a", float("inf"), NORMAL)]),
    "a type that is none": model([*START, ("a", 0.0, 9)]),
    "a text twice": model([*START, A, A]),
    "two unknowns": model([*START, ("<unk2>", 0.0, 2)]),
    "no unknown": model([("<s>", 0.0, CONTROL), A]),
    "some bytes": model([*START, *BYTES[:7]]),
    "a byte that is none": model([*START, *BYTES[:255], ("<0xfg>", 0.0, 6)]),
    "20,000 defined pieces": model([*START, *((f"d{i}", 0.0, USER_DEFINED) for i in range(20_000))]),
}
REFUSED = {
    "unigram": model([*START, A], model_type=1),
    "no kind of model": b"".join(piece(*each) for each in START),
    "charsmap": model([*START, A], normalizer=message(2, b"xx")),
    "escape_whitespaces": model([*START, A], normalizer=number(5, 0)),
    "whitespace_as_suffix": model([*START, A], trainer=number(24, 1)),
    "unused": model([*START, ("a", 0.0, UNUSED)]),
}


@pytest.mark.parametrize("name", variants([]))
def test_ids_are_those_of_sentencepiece(name: str) -> None:
    codec = SentencePieceCodec(parse_model(variants(VECTORS["words"])[name], name), {}, frozenset())
    for vector in VECTORS["vectors"]:
        assert codec.encode(vector["text"], False) == vector["ids"][name], repr(vector["text"])


def test_text_comes_back_piece_by_piece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(vendor_folders.chatglm3(tmp_path / "m"))
    for text in ("hello", " hello", "你好 the", "🦙 é\n", "the\n  the"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = Detokenizer(tokenizer)
        assert "".join(stream.push([token_id]) for token_id in ids) + stream.finish() == text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^some\.model cannot be read as a SentencePiece model: "):
        parse_model(BAD[name], "some.model")


@pytest.mark.parametrize("name", REFUSED)
def test_what_other_models_do_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^some\.model has .* not supported here; convert it"):
        parse_model(REFUSED[name], "some.model")


def test_a_larger_vocabulary_than_the_models_is_another_models(tmp_path: Path) -> None:
    for make in vendor_folders.FOLDERS.values():
        folder = make(tmp_path / make.__name__)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))
        with pytest.raises(CheckpointError, match="vocab_size 40: it is the tokenizer of another model"):
            load_tokenizer(folder)


def test_a_prompt_begins_as_the_publisher_has_it(tmp_path: Path) -> None:
    glm = load_tokenizer(vendor_folders.chatglm2(tmp_path / "g"))
    size = len(merged(vendor_folders.WORDS))
    assert glm.encode("x")[:2] == [size + 1, size + 3]
    folder = vendor_folders.baichuan(tmp_path / "b")
    assert load_tokenizer(folder).prefix == ()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BaichuanTokenizer"}))
    assert load_tokenizer(folder).prefix == (1,)
