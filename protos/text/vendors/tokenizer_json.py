"""A GGUF file's tokenizer written as Hugging Face's files, for programs that read only those."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from allspan.protos.api.errors import CheckpointError
from allspan.protos.text.tokenizers import pretokenizers
from allspan.protos.text.tokenizers.gguf_ends import TokenType, token_types
from allspan.protos.text.tokenizers.gguf_metadata import read_metadata
from allspan.protos.text.tokenizers.library_errors import library_errors
from allspan.protos.text.tokenizers.tokenizer import Tokenizer

_ADDED = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
_SPACE = "▁"


def huggingface_files(path: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files by name. `tokenizer`: the one that was made of the same GGUF file. CheckpointError for a
    vocabulary whose kind cannot be written so."""
    metadata = read_metadata(path)
    tokens, types = metadata["tokenizer.ggml.tokens"], token_types(metadata)
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    kind = metadata.get("tokenizer.ggml.model")
    with library_errors(f"{path}: the vocabulary cannot be written as a tokenizer.json"):
        if kind == "gpt2":
            backend = _byte_level(metadata, texts)
        elif kind == "llama":
            backend = _sentencepiece(metadata, texts, types, tokenizer.strips_leading_space)
        else:
            raise CheckpointError(f"{path}: a tokenizer of the kind {kind!r} cannot be written as a tokenizer.json")
        backend.add_tokens(
            [
                AddedToken(texts[i], special=type_ != TokenType.USER_DEFINED, normalized=False)
                for i, type_ in enumerate(types)
                if type_ in _ADDED
            ]
        )
        if tokenizer.prefix or tokenizer.suffix:
            ends = dict.fromkeys((*tokenizer.prefix, *tokenizer.suffix))
            pieces = [*(texts[i] for i in tokenizer.prefix), "$A", *(texts[i] for i in tokenizer.suffix)]
            backend.post_processor = processors.TemplateProcessing(
                single=pieces, special_tokens=[(texts[i], i) for i in ends]
            )
        written = backend.to_str()
    return {
        "tokenizer.json": written.encode(),
        "tokenizer_config.json": _dumped(_settings(tokenizer, texts)),
        "config.json": _dumped(_model(metadata, tokenizer, len(texts))),
        "generation_config.json": _dumped({"eos_token_id": list(tokenizer.eos_token_ids)}),
    }


def _settings(tokenizer: Tokenizer, texts: list[str]) -> dict[str, Any]:
    named = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    return {
        **{name: texts[token_id] for name, token_id in named.items() if token_id is not None},
        "add_bos_token": bool(tokenizer.prefix),
        "add_eos_token": bool(tokenizer.suffix),
        **({"chat_template": tokenizer.chat_template.published} if tokenizer.chat_template else {}),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _model(metadata: Mapping[str, Any], tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    kind = str(metadata.get("general.architecture", ""))
    length = metadata.get(f"{kind}.context_length")
    return {
        "model_type": kind,
        "vocab_size": size,
        **({} if length is None else {"max_position_embeddings": length}),
        **({} if tokenizer.bos_token_id is None else {"bos_token_id": tokenizer.bos_token_id}),
        "eos_token_id": list(tokenizer.eos_token_ids),
    }


def _byte_level(metadata: Mapping[str, Any], texts: list[str]) -> Backend:
    rule = pretokenizers.rule(metadata.get("tokenizer.ggml.pre", "default"))
    assert rule is not None  # its tokenizer has been made
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", []):
        left, _, right = merge[1:].partition(" ")  # a first character may itself be a space
        merges.append((merge[:1] + left, right))
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    backend = Backend(BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], texts: list[str], types: list[int], adds_space: bool) -> Backend:
    """SentencePiece merges the pair with the best score of the result: as BPE, all ways to halve each piece, in the
    order of the scores."""
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(texts)
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    merged = sorted(
        (i for i, kind in enumerate(types) if kind == TokenType.NORMAL and len(texts[i]) > 1),
        key=lambda i: (-scores[i], i),
    )
    merges = [
        (texts[i][:at], texts[i][at:])
        for i in merged
        for at in range(1, len(texts[i]))
        if texts[i][:at] in vocabulary and texts[i][at:] in vocabulary
    ]
    unknown = next((texts[i] for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    backend = Backend(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    first = [normalizers.Prepend(_SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode()
