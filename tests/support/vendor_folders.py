"""Tiny tokenizer folders in the files of Qwen 1, ChatGLM2, ChatGLM3, GLM-4 and Baichuan, made for one test."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from support.sentencepiece_files import USER_DEFINED, merged, model

WORDS = ("▁the", "▁hello", "▁你好", "system", "user", "▁▁", "问：", "答：", "[Round", "\n\n", "：你")
RESERVED = 200
"""Number of the reserved pieces of tiny Baichuan vocabularies."""


def ranks(words: Iterable[str]) -> bytes:
    """A tiktoken file: all bytes, and the beginnings of the words."""
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)
    for word in words:
        data = word.encode()
        for size in range(2, len(data) + 1):
            if data[:size] not in known:
                known.add(data[:size])
                tokens.append(data[:size])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def qwen(folder: Path, chat_format: str = "chatml") -> Path:
    _settings(folder, "QWenTokenizer", {"model_type": "qwen"}, {"chat_format": chat_format})
    (folder / "qwen.tiktoken").write_bytes(ranks([" hello", "system", "user", " helpful", "\n\n", "你好"]))
    return folder


def chatglm2(folder: Path) -> Path:
    return _chatglm(folder, "THUDM/chatglm-6b")


def chatglm3(folder: Path) -> Path:
    return _chatglm(folder, "THUDM/chatglm3-6b")


def glm4(folder: Path) -> Path:
    _settings(folder, "ChatGLM4Tokenizer", {"model_type": "chatglm"}, {})
    (folder / "tokenizer.model").write_bytes(ranks([" hello", "system", "user", "\n\n", "你好"]))
    return folder


def baichuan(folder: Path, dummy_prefix: bool = False, base: bool = False) -> Path:
    pieces = merged([word for word in WORDS if "\n" not in word])
    first = len(pieces)
    pieces += [(f"<reserved_{i}>", 0.0, USER_DEFINED) for i in range(RESERVED)]
    pieces += [("\n", 0.0, USER_DEFINED), ("\t", 0.0, USER_DEFINED), ("ab", 0.0, USER_DEFINED)]
    roles = {} if base else {"user_token_id": first + 106, "assistant_token_id": first + 107}
    _settings(folder, "BaichuanTokenizer", {"model_type": "baichuan"}, roles, add_bos_token=False, add_eos_token=False)
    (folder / "tokenizer.model").write_bytes(model(pieces, dummy_prefix))
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "qwen": qwen,
    "chatglm2": chatglm2,
    "chatglm3": chatglm3,
    "glm4": glm4,
    "baichuan": baichuan,
}


def _chatglm(folder: Path, name: str) -> Path:
    _settings(folder, "ChatGLMTokenizer", {"model_type": "chatglm", "eos_token_id": 2}, {}, name_or_path=name)
    (folder / "tokenizer.model").write_bytes(model(merged(WORDS)))
    return folder


def _settings(folder: Path, kind: str, config: dict[str, Any], generation: dict[str, Any], **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **more}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))


def texts(ids: Sequence[int], piece: Callable[[int], bytes]) -> list[str]:
    """The ids as what they say."""
    return [piece(token_id).decode("utf-8", "backslashreplace") for token_id in ids]
