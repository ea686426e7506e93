"""The default model's tokenizer, against ids that llama.cpp gave for the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allspan.protos.config.home import models_dir
from allspan.protos.text import Detokenizer, Tokenizer, generation_defaults, load_tokenizer

VECTORS = json.loads(Path(__file__).with_name("smollm2_vectors.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def path() -> Path:
    found = sorted(models_dir().rglob("SmolLM2-135M-Instruct*.gguf")) if models_dir().is_dir() else []
    if not found:
        pytest.skip(f"the default model is not in {models_dir()}: allspan pull SmolLM2-135M-Instruct")
    return found[0]


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: ascii(vector["text"])[:30])
def test_ids_are_llama_cpps(tokenizer: Tokenizer, vector: dict[str, object]) -> None:
    assert tokenizer.encode(str(vector["text"]), parse_special=bool(vector["parse_special"])) == vector["ids"]


def test_spaces_before_digits_are_one_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("  42")) == 3


def test_texts_come_back(tokenizer: Tokenizer) -> None:
    for vector in VECTORS:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(detokenizer.push([i]) for i in vector["ids"]) + detokenizer.finish() == vector["text"]


def test_its_ends_and_its_chat_are_those_of_the_file(path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == generation_defaults(path).eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1
    assert ids[1] != 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
