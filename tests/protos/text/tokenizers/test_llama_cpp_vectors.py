"""Vocabularies out of GGUF files cut text exactly as llama.cpp does: its own test vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.protos.text import load_tokenizer
from support import llama_cpp_vectors

# Vocabulary → how many vectors there are.
SETS = {
    "command-r": 47,
    "deepseek-coder": 47,
    "deepseek-llm": 47,
    "falcon": 47,
    "gpt-2": 47,
    "llama-bpe": 47,
    "llama-spm": 47,
    "mpt": 47,
    "phi-3": 47,
    "qwen2": 47,
    "qwen35": 51,
    "refact": 47,
    "starcoder": 47,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return llama_cpp_vectors.folder(set(SETS))
    except llama_cpp_vectors.NotToBeHad as error:
        pytest.skip(f"llama.cpp's tokenizer vectors: {error}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SETS)
def test_every_vector_gives_the_same_ids_and_its_text_back(folder: Path, name: str) -> None:
    vocabulary = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = load_tokenizer(vocabulary)
    vectors = llama_cpp_vectors.vectors(vocabulary)
    assert len(vectors) == SETS[name]
    for text, ids in vectors:
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text
