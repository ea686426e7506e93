"""Tokenizers out of GGUF metadata, equal to llama.cpp's token for token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.limits import MAX_CONTROL_TOKENS, MAX_TEMPLATE_BYTES, MAX_TOKEN_BYTES
from allspan.protos.text.chat_template import ChatTemplate
from allspan.protos.text.tokenizers import pretokenizers
from allspan.protos.text.tokenizers.byte_level import token_to_bytes
from allspan.protos.text.tokenizers.gguf_ends import SPM_BOS, SPM_EOS, TokenType, end_ids, token_types
from allspan.protos.text.tokenizers.gguf_metadata import names_of, read_metadata
from allspan.protos.text.tokenizers.library_errors import library_errors
from allspan.protos.text.tokenizers.special import NO_TOKEN, SpecialTokens
from allspan.protos.text.tokenizers.spm import SpmModel
from allspan.protos.text.tokenizers.tokenizer import Codec, Tokenizer
from allspan.protos.text.vendors.gguf import gguf_format

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What the keys must hold: a type, or for a list the type of its entries.
_SCALARS = {
    "model": str,
    "pre": str,
    "bos_token_id": int,
    "eos_token_id": int,
    "eot_token_id": int,
    "eom_token_id": int,
    "add_bos_token": bool,
    "add_eos_token": bool,
    "add_space_prefix": bool,
}
_IDS = tuple(key for key in _SCALARS if key.endswith("_token_id"))
_NO_ID = 2**32 - 1
"""What some tools write for a token that the model has not."""
_LOOKED_FOR = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
_NEVER_MERGED = (TokenType.CONTROL, TokenType.UNKNOWN)
_LISTS = {"tokens": (str,), "merges": (str,), "token_type": (int,), "scores": (int, float)}


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file. Raises CheckpointError naming what is missing or not supported."""
    metadata = read_metadata(path)
    _check(path, metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        name = metadata.get("tokenizer.ggml.pre", "default")
        rule = pretokenizers.rule(name)
        if rule is None:
            known = ", ".join(pretokenizers.names())
            raise CheckpointError(f"{path}: pre-tokenizer {name!r} is not supported; supported are {known}")
        return _tokenizer(path, metadata, BpeCodec(path, metadata, rule), rule.add_bos, False)
    if kind == "llama":
        add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", not _is_baichuan2(metadata)))
        return _tokenizer(path, metadata, SpmCodec(metadata, add_space), True, add_space)
    raise CheckpointError(f"{path}: tokenizer model {kind!r} is not supported; supported are 'gpt2' and 'llama'")


def _check(path: Path, metadata: Mapping[str, Any]) -> None:
    values = {
        key: metadata[f"tokenizer.ggml.{key}"] for key in (*_SCALARS, *_LISTS) if f"tokenizer.ggml.{key}" in metadata
    }
    if not values.get("tokens"):
        raise CheckpointError(f"{path} holds no vocabulary (tokenizer.ggml.tokens); give a complete GGUF file")
    for key, value in values.items():
        entries = value if key in _LISTS and isinstance(value, list) else [value]
        wanted = _LISTS.get(key) or (_SCALARS[key],)
        if (key in _LISTS) != isinstance(value, list) or not set(map(type, entries)) <= set(wanted):
            kinds = " or ".join(kind.__name__ for kind in wanted)
            raise CheckpointError(f"{path}: tokenizer.ggml.{key} must hold {'a list of ' * (key in _LISTS)}{kinds}")
        if key in ("token_type", "scores") and len(value) < len(values["tokens"]):
            count = len(values["tokens"])
            raise CheckpointError(f"{path}: tokenizer.ggml.{key} has {len(value)} entries for {count} tokens")
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{path}: tokenizer.chat_template must hold str of at most {MAX_TEMPLATE_BYTES} characters"
        )
    tokens = values["tokens"]
    for key in _IDS:
        if (value := values.get(key, _NO_ID)) != _NO_ID and not 0 <= value < len(tokens):
            raise CheckpointError(
                f"{path}: tokenizer.ggml.{key} is {value}, must be below {len(tokens)}, the number of tokens"
            )
    if (longest := max(map(len, tokens))) > MAX_TOKEN_BYTES:
        raise CheckpointError(f"{path}: a token has {longest} characters, must have at most {MAX_TOKEN_BYTES}")
    types = values.get("token_type", [])
    if (special := sum(kind in _LOOKED_FOR for kind in types)) > MAX_CONTROL_TOKENS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.token_type has {special} control and user-defined tokens, must have at most "
            f"{MAX_CONTROL_TOKENS}"
        )


class BpeCodec:
    """Byte-level BPE ("gpt2")."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], rule: pretokenizers.Rule) -> None:
        tokens = _tokens(metadata)
        types = token_types(metadata)
        self.vocab_size = len(tokens)
        self._special = _special(tokens, types)
        self.control = self._special.control
        merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
        vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
        with library_errors(f"{path}: the vocabulary and merges do not fit together"):
            model = BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges)
        self._backend = Backend(model)
        self._backend.pre_tokenizer = rule.pre_tokenizer()
        plain = (TokenType.NORMAL, TokenType.BYTE)
        self._pieces = [
            token_to_bytes(text) if kind in plain else b"" if kind == TokenType.UNUSED else text.encode()
            for text, kind in zip(tokens, types, strict=True)
        ]

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return self._ids(self._special.split(text, parse_special))

    def encode_framed(self, text: str) -> list[int]:
        return self._ids(self._special.split_framed(text))

    def _ids(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids += [part] * (part != NO_TOKEN)
            else:
                ids += self._backend.encode(part, add_special_tokens=False).ids
        return ids

    def piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""


class SpmCodec:
    """SentencePiece BPE with scores and byte fallback ("llama")."""

    def __init__(self, metadata: Mapping[str, Any], add_space_prefix: bool) -> None:
        tokens = _tokens(metadata)
        types = token_types(metadata)
        self.vocab_size = len(tokens)
        self._special = _special(tokens, types)
        self.control = self._special.control
        self._add_space = add_space_prefix
        scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
        words = [text if kind not in _NEVER_MERGED else "" for text, kind in zip(tokens, types, strict=True)]
        self._model = SpmModel(words, scores)
        self._pieces = [_spm_piece(text, kind) for text, kind in zip(tokens, types, strict=True)]

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return self._ids(self._special.split(text, parse_special))

    def encode_framed(self, text: str) -> list[int]:
        return self._ids(self._special.split_framed(text))

    def _ids(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        after_special = True
        for part in parts:
            if isinstance(part, str):
                ids += self._model.encode(" " + part if self._add_space and after_special else part)
                after_special = False
            elif part != NO_TOKEN:
                ids.append(part)
                after_special = True
        return ids

    def piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""


def _tokenizer(path: Path, metadata: Mapping[str, Any], codec: Codec, add_bos: bool, strips_space: bool) -> Tokenizer:
    tokens, types = metadata["tokenizer.ggml.tokens"], token_types(metadata)
    spm = metadata["tokenizer.ggml.model"] == "llama"
    bos = _id(metadata, "bos_token_id", SPM_BOS if spm else None)
    eos = _id(metadata, "eos_token_id", SPM_EOS if spm else None)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and bos is not None
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and eos is not None
    source = metadata.get("tokenizer.chat_template")
    template: ChatTemplate | None
    if source:
        template = ChatTemplate(source, "" if bos is None else tokens[bos], "" if eos is None else tokens[eos])
    else:
        template = gguf_format(metadata, [*names_of(metadata), path.stem])
    return Tokenizer(
        codec=codec,
        name=path.stem,
        special_ids=frozenset(i for i, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)),
        bos_token_id=bos,
        eos_token_ids=end_ids(metadata),
        prefix=(bos,) if add_bos and bos is not None else (),
        suffix=(eos,) if add_eos and eos is not None else (),
        strips_leading_space=strips_space,
        chat_template=template,
    )


def _is_baichuan2(metadata: Mapping[str, Any]) -> bool:
    """Its texts begin without a space, which no converter writes down; the first Baichuan's have one."""
    return metadata.get("general.architecture") == "baichuan" and len(metadata["tokenizer.ggml.tokens"]) > 64_000


def _id(metadata: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    return value if value is not None and 0 <= value < len(metadata["tokenizer.ggml.tokens"]) else None


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    return [text or f"[EMPTY_{i}]" for i, text in enumerate(metadata["tokenizer.ggml.tokens"])]


def _special(tokens: list[str], types: list[int]) -> SpecialTokens:
    control = {t: i for i, t in enumerate(tokens) if types[i] in (TokenType.CONTROL, TokenType.UNKNOWN)}
    defined = {t: i for i, t in enumerate(tokens) if types[i] == TokenType.USER_DEFINED}
    return SpecialTokens(control, defined, (i for i, kind in enumerate(types) if kind == TokenType.UNKNOWN))


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # a first character may itself be a space
    return merge[:1] + left, right


def _spm_piece(text: str, kind: int) -> bytes:
    if kind == TokenType.BYTE and (byte := _BYTE.fullmatch(text)):
        return bytes([int(byte[1], 16)])
    if kind == TokenType.NORMAL:
        return text.replace("▁", " ").encode()
    return b"" if kind == TokenType.UNUSED else text.encode()
