"""The tokenizers of folders in a publisher's own files: `families` says which, `chat_formats` how they chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allspan.protos.text.chat_template import ChatTemplate
from allspan.protos.text.model_defaults import generation_defaults
from allspan.protos.text.tokenizers.gguf_ends import TokenType
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.protos.text.vendors.chat_formats import FORMATS
from allspan.protos.text.vendors.families import SENTENCEPIECE, Family, appended_ids
from allspan.protos.text.vendors.sentencepiece_codec import SentencePieceCodec
from allspan.protos.text.vendors.sentencepiece_model import read_model


def load_sentencepiece(
    folder: Path, family: Family, config: Mapping[str, Any], template: ChatTemplate | None
) -> Tokenizer:
    """The tokenizer of a family with a SentencePiece model. `config`: its tokenizer_config.json; `template`: the
    folder's own. Raises CheckpointError."""
    model = read_model(folder / SENTENCEPIECE)
    appended = appended_ids(family, len(model.pieces))
    codec = SentencePieceCodec(model, appended, frozenset(family.roles))
    ids = {text: i for i, text in enumerate(model.pieces)} | appended
    bos, eos = ids.get(str(_text(config, "bos_token", "<s>"))), ids.get(str(_text(config, "eos_token", "</s>")))
    before = [ids[text] for text in family.prefix]
    if bos is not None and _flag(config, "add_bos_token", family.adds_bos):
        before.insert(0, bos)
    is_added = eos is not None and _flag(config, "add_eos_token", False)
    special = [*model.ids_of(TokenType.CONTROL, TokenType.UNKNOWN), *appended.values()]
    special += [ids[text] for text in family.roles if text in ids]
    ends = [] if eos is None else [eos]
    return Tokenizer(
        codec=codec,
        name=folder.name,
        special_ids=frozenset(special),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys([*ends, *generation_defaults(folder).eos_token_ids])),
        prefix=tuple(before),
        suffix=(eos,) if is_added and eos is not None else (),
        strips_leading_space=model.adds_dummy_prefix,
        chat_template=template or format_of(folder, family, lambda i: codec.piece(i).decode("utf-8", "replace")),
    )


def format_of(folder: Path, family: Family, text_of: Callable[[int], str]) -> ChatTemplate | None:
    """The family's chat format; None for a folder whose model is none for chat. `text_of` gives the text of an id."""
    form = FORMATS[family.name]
    names = form.names(folder, text_of)
    return None if names is None else ChatTemplate(form.source, "", "", names)


def _text(config: Mapping[str, Any], key: str, default: str) -> Any:
    value = config.get(key) or default
    return value.get("content") if isinstance(value, dict) else value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    return default if value is None else bool(value)
