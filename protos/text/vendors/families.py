"""The tokenizer classes that publishers ship as Python beside their models: a row a family, as data.

Their files hold the vocabulary alone; the special tokens behind it, the beginning of every prompt and the tokens that
end an answer are known by that code alone, which is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.model_files.json_values import read_json_object
from allspan.protos.model_files.limits import MAX_TOKENIZER_BYTES
from allspan.protos.model_files.regular_file import is_there, open_regular, read_regular
from allspan.protos.text.vendors.ranks import RankedVocabulary, read_tiktoken
from allspan.protos.text.vendors.sentencepiece_model import ids_of_texts, is_sentencepiece

SENTENCEPIECE = "tokenizer.model"
"""The file of SentencePiece's vocabularies, and of GLM-4's ranks."""


@dataclass(frozen=True)
class Family:
    """The tokenizer of one family of models."""

    name: str
    file: str
    """The vocabulary's file."""
    is_ranked: bool
    """The file is a list of ranks rather than a SentencePiece model."""
    appended: tuple[str, ...] = ()
    """The special tokens that follow the vocabulary, in the order of their ids."""
    prefix: tuple[str, ...] = ()
    """The special tokens that begin every prompt."""
    ends: tuple[str, ...] = ()
    """The special tokens that end an answer."""
    most_digits: int = 1
    """Digits of one word, of ranks."""
    composes: bool = False
    """Characters are composed first (NFC), of ranks."""
    adds_bos: bool = False
    """A prompt begins with the begin-of-sequence token unless tokenizer_config.json says otherwise."""
    roles: tuple[str, ...] = ()
    """Pieces of the vocabulary that stand for roles."""


_GLM = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MEDIA = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
_GLM_PREFIX = ("[gMASK]", "<sop>")

QWEN = Family(
    "qwen",
    "qwen.tiktoken",
    is_ranked=True,
    appended=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    ends=("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    composes=True,
)
CHATGLM2 = Family("chatglm2", SENTENCEPIECE, is_ranked=False, appended=_GLM, prefix=_GLM_PREFIX, ends=("</s>",))
CHATGLM3 = Family(
    "chatglm3",
    SENTENCEPIECE,
    is_ranked=False,
    appended=(*_GLM, *_GLM_ROLES),
    prefix=_GLM_PREFIX,
    ends=("</s>", "<|user|>", "<|observation|>"),
)
GLM4 = Family(
    "glm4",
    SENTENCEPIECE,
    is_ranked=True,
    appended=("<|endoftext|>", *_GLM, *_GLM_ROLES, *_GLM_MEDIA),
    prefix=_GLM_PREFIX,
    ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    most_digits=3,
)
BAICHUAN = Family(
    "baichuan",
    SENTENCEPIECE,
    is_ranked=False,
    ends=("</s>",),
    adds_bos=True,
    roles=tuple(f"<reserved_{i}>" for i in range(1024)),
)

_CLASSES = {"QWenTokenizer": "qwen", "BaiChuanTokenizer": "baichuan", "BaichuanTokenizer": "baichuan"}
_CLASSES |= {"ChatGLMTokenizer": "chatglm", "ChatGLM4Tokenizer": "chatglm"}


def family_of(folder: Path, config: Mapping[str, Any] | None = None) -> Family | None:
    """The family whose own files the folder has; None for a folder with a tokenizer.json, and for all others.
    `config`: its tokenizer_config.json, if that is read already. CheckpointError for a file that cannot be read."""
    if is_there(folder / "tokenizer.json"):
        return None
    config = _read(folder / "tokenizer_config.json") if config is None else config
    kind = _CLASSES.get(str(config.get("tokenizer_class")))
    model = _read(folder / "config.json")
    if kind is None and "tokenizer_class" not in config and model.get("model_type") in _CLASSES.values():
        kind = str(model["model_type"])
    if kind == "qwen" and is_there(folder / QWEN.file):
        return QWEN
    if kind not in ("chatglm", "baichuan") or not is_there(folder / SENTENCEPIECE):
        return None
    if kind == "baichuan":
        return BAICHUAN
    with open_regular(folder / SENTENCEPIECE) as file:
        if not is_sentencepiece(file.read(1)):
            return GLM4
    return CHATGLM3 if _is_chatglm3(folder, config, model) else CHATGLM2


def ranked_vocabulary(folder: Path, family: Family) -> RankedVocabulary:
    """The vocabulary of a family with ranks. Raises CheckpointError."""
    from allspan.protos.text.tokenizers.pretokenizers import tiktoken_expression  # loads the library of tokenizers

    file = folder / family.file
    ranks = read_tiktoken(read_regular(file, MAX_TOKENIZER_BYTES), str(file))
    return RankedVocabulary(
        ranks=ranks,
        special=appended_ids(family, max(ranks.values()) + 1),
        expression=tiktoken_expression(family.most_digits),
        composes=family.composes,
        prefix=family.prefix,
    )


def appended_ids(family: Family, size: int) -> dict[str, int]:
    """The ids of the special tokens that follow a vocabulary of this size."""
    return {text: size + i for i, text in enumerate(family.appended)}


def end_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer, for a folder of one of the families; none for others. Raises CheckpointError."""
    family = family_of(folder)
    if family is None:
        return ()
    file = folder / family.file
    data = read_regular(file, MAX_TOKENIZER_BYTES)
    if family.is_ranked:
        ids = appended_ids(family, max(read_tiktoken(data, str(file)).values()) + 1)
    else:
        found, size = ids_of_texts(data, family.ends, str(file))
        ids = found | appended_ids(family, size)
    return tuple(ids[text] for text in family.ends if text in ids)


def _is_chatglm3(folder: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """ChatGLM2 and 3 have the same class and vocabulary; what tells them apart is their names and role tokens."""
    names = (config.get("name_or_path"), config.get("_name_or_path"), model.get("_name_or_path"), folder.name)
    if any("chatglm3" in str(name).lower() for name in names):
        return True
    listed = (config.get("added_tokens_decoder"), config.get("additional_special_tokens"), config.get("chat_template"))
    if any("<|user|>" in str(value) for value in listed):
        return True
    code = folder / "tokenization_chatglm.py"  # looked at, never run
    return is_there(code) and b"<|user|>" in read_regular(code, MAX_TOKENIZER_BYTES)


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file) if is_there(file) else {}
