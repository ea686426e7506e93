"""The ids of a GGUF file's vocabulary that end an answer. Needs no tokenizer: a rank asks, too."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

SPM_BOS, SPM_EOS = 1, 2  # of a SentencePiece vocabulary that does not say
# Texts that end a turn in the chat formats of the supported families; a file may leave their ids out of its metadata.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|observation|>", "<turn|>")

_CHANNELS, _CHANNEL_ENDS = "gpt-oss", {"<|return|>", "<|call|>"}
"""The architecture whose answers have several messages, each with an end of its own, and what ends an answer there."""

_GLM = ("chatglm", "glm4")
"""The architectures whose answers end where the next role begins."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the file's end-of-sequence, -turn and -message ids and well-known turn ends."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = token_types(metadata)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = {key: metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata}
    if metadata.get("tokenizer.ggml.model") == "llama":
        found.setdefault("eos_token_id", SPM_EOS)
    ids = list(found.values())
    turn_ends = {*_TURN_ENDS, *(("<|user|>",) if metadata.get("general.architecture") in _GLM else ())}
    if metadata.get("general.architecture") == _CHANNELS:
        turn_ends, ids = _CHANNEL_ENDS, ids[:1]
    ids += [i for i, text in enumerate(tokens) if text in turn_ends and types[i] == TokenType.CONTROL]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < len(tokens)))


def token_types(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the type of each token; NORMAL where the file has none."""
    count = len(metadata.get("tokenizer.ggml.tokens", []))
    types = metadata.get("tokenizer.ggml.token_type", [])
    return [*types[:count], *[int(TokenType.NORMAL)] * (count - len(types))]
