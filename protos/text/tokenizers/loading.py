"""Loads every kind of tokenizer: from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from allspan.protos.api.errors import ModelNotFound
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of
from allspan.protos.text.tokenizers.gguf_tokenizer import load_gguf
from allspan.protos.text.tokenizers.huggingface import load_folder
from allspan.protos.text.tokenizers.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder (Hugging Face layout) or a GGUF file (or a folder with one).

    Raises ModelNotFound when there is no such path, CheckpointError when what is there cannot be used.
    """
    path = Path(path)
    if gguf := gguf_of(path):
        return load_gguf(gguf)
    if path.is_dir():
        return load_folder(path)
    raise ModelNotFound(f"no model at {path}: expected a folder with a tokenizer.json, or a GGUF file")
