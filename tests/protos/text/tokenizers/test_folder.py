"""Tokenizers of model folders, against transformers'."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from allspan.protos.api.errors import CheckpointError, InvalidRequest, ModelNotFound
from allspan.protos.text import load_tokenizer
from support.hf_folders import CHATML, byte_level, sentencepiece_like

transformers = pytest.importorskip("transformers")

TEXTS = [
    "",
    "hello world",
    "  the  quick\n\nfox ",
    "Zwölf 你好 🦙\u200d",
    "<s>a</s>",
    "x<|im_end|> <think>y",
    "\u0301e",
    "1 + 2",
]


def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("bos", [False, True])
def test_byte_level_folders_encode_and_decode_as_transformers(tmp_path: Path, bos: bool) -> None:
    folder = byte_level(tmp_path, bos)
    ours, other = load_tokenizer(folder), theirs(folder)
    assert ours.vocab_size == len(other)
    for text in TEXTS:
        if not (bos and text.startswith("<s>")):
            assert ours.encode(text) == other.encode(text), repr(text)
        assert ours.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False), repr(text)
    generator = random.Random(0)
    for _ in range(100):
        ids = [generator.randrange(ours.vocab_size) for _ in range(12)]
        for skip in (True, False):
            assert ours.decode(ids, skip) == other.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_like_folders_encode_and_decode_as_tokenizers(tmp_path: Path) -> None:
    folder = sentencepiece_like(tmp_path)
    ours, other = load_tokenizer(folder), Backend.from_file(str(folder / "tokenizer.json"))
    for text in ("hello", " hello  hell", "héllo 世界\n", "hello</s>hello"):
        ids = other.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == other.decode(ids)
    assert ours.prefix == (1,)
    assert ours.decode(other.encode("hello hello").ids) == "hello hello"


def test_a_spelt_out_begin_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, bos=True))
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert tokenizer.encode("<s>a").count(0) == 1


@pytest.mark.parametrize(
    ("flags", "prefix", "suffix"),
    [
        ({}, (0,), ()),
        ({"add_bos_token": False}, (), ()),
        ({"add_bos_token": True, "add_eos_token": True}, (0,), (1,)),
    ],
)
def test_explicit_flags_win_over_the_post_processor(
    tmp_path: Path, flags: dict[str, bool], prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, bos=True, **flags))
    assert (tokenizer.prefix, tokenizer.suffix) == (prefix, suffix)


def test_named_tokens_may_be_objects_or_lie_in_the_map(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, bos_token={"content": "<s>", "lstrip": False}, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (3,)


def test_end_ids_are_the_tokenizers_and_generation_configs(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    assert load_tokenizer(folder).eos_token_ids == (1, 3)


def test_special_texts_are_letters_where_text_must_not_speak(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    assert tokenizer.encode("<|im_end|>") == [3]
    literal = tokenizer.encode("a<|im_end|>", parse_special=False)
    assert not tokenizer.special_ids & set(literal)
    assert tokenizer.decode(literal) == "a<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [3]


def test_tokens_that_only_the_config_lists_are_added_under_their_ids(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    size = load_tokenizer(folder).vocab_size
    entry = {str(size): {"content": "<|new|>", "special": True}}
    tokenizer = load_tokenizer(byte_level(tmp_path, added_tokens_decoder=entry))
    assert tokenizer.encode("<|new|>") == [size]
    assert tokenizer.decode([size]) == ""
    wrong = byte_level(tmp_path, added_tokens_decoder={str(size + 9): {"content": "<|new|>", "special": True}})
    with pytest.raises(CheckpointError, match=rf"'<\|new\|>' has id {size + 9}"):
        load_tokenizer(wrong)


def test_vocab_and_merges_alone_are_enough_for_qwen2(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "whole")
    backend = json.loads((folder / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(backend["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in backend["merges"])
    (old / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    entry = {"3": {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": entry}
    (old / "tokenizer_config.json").write_text(json.dumps(config))
    ours, other = load_tokenizer(old), theirs(old)
    for text in (*TEXTS[:4], "I'LL 2026", "cafe\u0301", "a<|im_end|>"):
        assert ours.encode(text) == other.encode(text), repr(text)
    assert ours.eos_token_ids == (3,)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model: neither config\.json nor tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    (byte_level(tmp_path) / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)


def test_an_unknown_decoder_is_refused_with_the_list(tmp_path: Path) -> None:
    tokenizer = Backend(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.CTC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"'CTC' .* not supported; supported are ByteLevel"):
        load_tokenizer(tmp_path)


def test_words_without_a_decoder_are_joined_by_spaces(tmp_path: Path) -> None:
    tokenizer = Backend(WordLevel({"<unk>": 0, "the": 1, "fox": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("the fox the wolf") == [1, 2, 1, 0]
    for ids in ([1, 2, 1, 0], [3, 1, 3, 2], [3]):
        for skip in (True, False):
            assert ours.decode(ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    with pytest.raises(InvalidRequest, match="surrogate pair at character 1") as caught:
        tokenizer.encode("a\ud800b")
    assert caught.value.field == "prompt"


def test_limits_that_a_tokenizer_file_carries_do_not_cut_prompts(tmp_path: Path) -> None:
    file = byte_level(tmp_path) / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.enable_truncation(3)
    backend.enable_padding(length=64, pad_token="<s>")
    backend.save(str(file))
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("the lazy dog 123")) == "the lazy dog 123"


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = byte_level(
        tmp_path, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert load_tokenizer(folder).render_chat([]) == "d"
    (folder / "chat_template.jinja").write_text(CHATML)
    assert load_tokenizer(folder).render_chat([]) == "<|im_start|>assistant\n"


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-text"
    tokenizer = load_tokenizer(folder if folder.exists() else byte_level(folder))
    if not any(special in text for special in ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>")):
        assert tokenizer.decode(tokenizer.encode(text)) == text
