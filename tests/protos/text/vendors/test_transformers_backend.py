"""Folders without a tokenizer.json, through transformers' AutoTokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import CheckpointError
from allspan.protos.text import load_tokenizer
from support.hf_folders import byte_level

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home where nothing is kept yet."""
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A byte-level vocabulary in the files of CodeGen's tokenizer, which this project has no rule for."""
    model: dict[str, Any] = json.loads((byte_level(tmp_path / "fast") / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|im_end|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CodeGenTokenizer", **names}))
    (folder / "config.json").write_text(json.dumps({"model_type": "codegen"}))
    return folder


def test_ids_and_text_are_those_of_transformers(slow: Path) -> None:
    ours, theirs = load_tokenizer(slow), transformers.AutoTokenizer.from_pretrained(slow)
    for text in ("hello world", "  the  quick\n\nfox ", "Zwölf 你好", "a<|im_end|>b", "I'LL 2026"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_without_transformers_the_message_names_the_extra(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*pip install '\.\[hf\]'.*save_pretrained"):
        load_tokenizer(slow)


def test_code_in_the_folder_never_runs(slow: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (slow / "tok.py").write_text(f"open({str(ran)!r}, 'w')\nclass Tok: pass\n")
    config = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    (slow / "tokenizer_config.json").write_text(json.dumps(config))
    (slow / "config.json").write_text(json.dumps({"model_type": "martian"}))
    with pytest.raises(CheckpointError, match="transformers cannot convert its tokenizer"):
        load_tokenizer(slow)
    assert not ran.exists()


def test_a_folder_whose_files_make_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, .*cannot convert.*save_pretrained"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_folder_without_any_vocabulary_is_refused(tmp_path: Path, family: str) -> None:
    """transformers makes a tokenizer of special tokens for some families."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, .*save_pretrained"):
        load_tokenizer(tmp_path)


def test_the_conversion_is_kept_until_a_file_changes(slow: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(file.name for file in slow.iterdir())
    made = load_tokenizer(slow)
    (kept,) = (home / "tokenizers").iterdir()
    assert sorted(file.name for file in slow.iterdir()) == before
    monkeypatch.setitem(sys.modules, "transformers", None)
    again = load_tokenizer(slow)
    assert again.encode("hello <|im_end|> world") == made.encode("hello <|im_end|> world")
    kept.write_text("{")
    with pytest.raises(CheckpointError, match=r"remove .*tokenizers"):
        load_tokenizer(slow)
    (slow / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(CheckpointError, match="transformers"):
        load_tokenizer(slow)


def test_a_home_that_cannot_be_written_only_costs_the_time(slow: Path, home: Path) -> None:
    home.write_text("a file")
    assert load_tokenizer(slow).encode("hello")
