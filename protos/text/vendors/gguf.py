"""The chat formats of GGUF files without a template, by the architecture and the special tokens of the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from allspan.protos.text.chat_template import ChatTemplate
from allspan.protos.text.tokenizers.gguf_ends import TokenType, token_types
from allspan.protos.text.vendors.chat_formats import FORMATS

_SPECIAL = (TokenType.CONTROL, TokenType.USER_DEFINED)
_ROLES = {"<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"}


def gguf_format(metadata: Mapping[str, Any], names: Iterable[str]) -> ChatTemplate | None:
    """The format of the file's architecture; None where its roles are no special tokens of the file, so that a text
    could pass for one (Baichuan's), or where nothing says that its model is one for chat. `names`: of the model."""
    types = token_types(metadata)
    special = {
        text for text, kind in zip(metadata.get("tokenizer.ggml.tokens", []), types, strict=True) if kind in _SPECIAL
    }
    architecture = metadata.get("general.architecture")
    if architecture in ("chatglm", "glm4"):
        start = "<sop>" if "<sop>" in special else "sop"  # as the older converters write it
        if not {"[gMASK]", start} <= special:
            return None
        is_ranked = metadata.get("tokenizer.ggml.model") == "gpt2"
        if special >= _ROLES:
            source = FORMATS["glm4" if is_ranked else "chatglm3"].source
        elif not is_ranked:
            source = FORMATS["chatglm2"].source
        else:
            return None
        return ChatTemplate(source.replace("[gMASK]<sop>", f"[gMASK]{start}"))
    is_chat = any("chat" in name.lower() for name in names)
    if architecture == "qwen" and is_chat and {"<|im_start|>", "<|im_end|>"} <= special:
        return ChatTemplate(FORMATS["qwen"].source)
    return None
