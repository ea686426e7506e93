"""Tokenizers of Hugging Face model folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from allspan.protos.api.errors import CheckpointError, InvalidRequest, ModelNotFound
from allspan.protos.model_files.json_values import read_json_object, shown
from allspan.protos.model_files.limits import MAX_AFFIXES, MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, MAX_VOCABULARY
from allspan.protos.model_files.regular_file import check_regular, is_there, read_regular, read_text
from allspan.protos.text.apart_codec import ApartCodec, check_rules, is_known
from allspan.protos.text.chat_template import ChatTemplate
from allspan.protos.text.model_defaults import generation_defaults
from allspan.protos.text.tokenizers import pretokenizers
from allspan.protos.text.tokenizers.control import ControlTexts, is_control_text
from allspan.protos.text.tokenizers.decoding import PieceDecoder, piece_decoder
from allspan.protos.text.tokenizers.framed_backend import framed_backend
from allspan.protos.text.tokenizers.library_errors import is_panic, library_errors
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.protos.text.vendors.conversion import kept
from allspan.protos.text.vendors.families import Family, family_of, ranked_vocabulary
from allspan.protos.text.vendors.folder import format_of, load_sentencepiece
from allspan.protos.text.vendors.ranks import read_tekken
from allspan.protos.text.vendors.transformers_backend import converted_backend

# Folders with vocab.json and merges.txt alone that need no transformers: what their class does to text before merging.
_RULES_BY_CLASS = {"Qwen2Tokenizer": "qwen2", "Qwen2TokenizerFast": "qwen2", "GPT2Tokenizer": "gpt-2"}
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ADDED = re.compile(rb'"added_tokens"\s*:\s*\[')
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_folder(path: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises CheckpointError naming the file that is missing or bad."""
    config = _read_json(path / "tokenizer_config.json")
    named = _named_tokens(path, config)
    source = _template_source(path, config)
    family = family_of(path, config)
    if source is not None and family is not None and "<sop>" in family.appended:
        source = source.replace("[gMASK]sop", "[gMASK]<sop>")  # as ChatGLM3's template spells that token
    template = None if source is None else _template(source, named)
    if family is not None and not family.is_ranked:
        made = load_sentencepiece(path, family, config, template)
        _check_size(path, made.vocab_size, made.vocab_size)
        return made
    backend, added = _backend(path, config, family)
    codec = FolderCodec(backend, added, path)
    bos, eos = (backend.token_to_id(named[key]) if key in named else None for key in ("bos_token", "eos_token"))
    with library_errors(f"{path}: the tokenizer cannot encode a text"):
        prefix, suffix = _wrapping(backend, config, bos, eos)
    for name, affix in (("before", prefix), ("after", suffix)):
        if len(affix) > MAX_AFFIXES:
            raise CheckpointError(
                f"{path}: the tokenizer puts {len(affix)} tokens {name} every prompt, must be at most {MAX_AFFIXES}"
            )
    ends = ([] if eos is None else [eos]) + list(generation_defaults(path).eos_token_ids)
    if template is None and family is not None:
        template = format_of(path, family, lambda token_id: backend.id_to_token(token_id) or "")
    return Tokenizer(
        codec=codec if is_known(backend) else ApartCodec(codec, backend.to_str()),
        name=path.name,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        prefix=prefix,
        suffix=suffix,
        strips_leading_space=codec.strips_leading_space,
        chat_template=template,
    )


class FolderCodec:
    """A `tokenizers` tokenizer with its own normaliser, pre-tokeniser and added tokens."""

    def __init__(self, backend: Backend, added: Mapping[int, AddedToken], path: Path) -> None:
        self._backend = backend
        self._literal: Backend | None = None
        self._framed: tuple[Backend, dict[int, int]] | None = None
        self._added_tokens = added
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        steering = {t.content: i for i, t in added.items() if t.special or is_control_text(t.content)}
        unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self.control = ControlTexts(steering, () if unknown is None else (unknown,))
        self._decode: PieceDecoder = piece_decoder(_described(backend.decoder), path)
        self.strips_leading_space = self._decode.strips_leading_space
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return _encoded(self._backend if parse_special else self._without_special(), text)

    def encode_framed(self, text: str) -> list[int]:
        backend, meant = self.framed()
        ids = (meant.get(token_id, token_id) for token_id in _encoded(backend, text))
        return [token_id for token_id in ids if token_id >= 0]

    def framed(self) -> tuple[Backend, dict[int, int]]:
        """See `framed_backend`; made when first needed."""
        if self._framed is None:
            self._framed = framed_backend(self._backend, self._added_tokens, self.control)
        return self._framed

    def piece(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return self._decode.before + added
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self._decode(token)

    def _without_special(self) -> Backend:
        """A second copy, made when first needed: whether special texts are parsed is a setting of the whole backend."""
        if self._literal is None:
            literal = Backend.from_str(self._backend.to_str())
            literal.encode_special_tokens = True
            self._literal = literal
        return self._literal


def _encoded(backend: Backend, text: str) -> list[int]:
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, Exception) or is_panic(error):
            raise InvalidRequest(f"prompt makes the model's tokenizer fail: {error}", "prompt") from error
        raise


def _described(decoder: decoders.Decoder | None) -> dict[str, Any] | None:
    """A decoder as tokenizer.json writes it."""
    if decoder is None:
        return None
    description: dict[str, Any] = json.loads(decoder.__getstate__())
    return description


def _backend(path: Path, config: Mapping[str, Any], family: Family | None) -> tuple[Backend, dict[int, AddedToken]]:
    file = path / "tokenizer.json"
    if is_there(file):
        backend = _read_backend(read_regular(file, MAX_TOKENIZER_BYTES), str(file))
    elif family is not None:
        file = path / family.file
        backend = _read_backend(*kept(path, lambda: ranked_vocabulary(path, family).tokenizer_json(str(file))))
    elif is_there(file := path / "tekken.json"):
        data = read_regular(file, MAX_TOKENIZER_BYTES)
        backend = _read_backend(*kept(path, lambda: read_tekken(data, str(file)).tokenizer_json(str(file))))
    else:
        backend = _from_vocab_and_merges(path, config)
    backend.no_truncation()
    backend.no_padding()
    sizes = (max(backend.get_vocab(with_added_tokens=added).values(), default=-1) + 1 for added in (False, True))
    _check_size(path, *sizes)
    _add_tokens(path, backend, config)
    return backend, dict(backend.get_added_tokens_decoder())


def _read_backend(data: bytes, source: str) -> Backend:
    """The tokenizer of a tokenizer.json; `source` is what messages name."""
    check_rules(data, source)
    with library_errors(f"{source} cannot be read"):
        backend = Backend.from_buffer(data)
    _check_added(source, data, backend)
    return backend


def _check_size(path: Path, found: int, with_added: int) -> None:
    """A vocabulary larger than the model's is another model's. Added tokens do not count: some models have one or two
    that only their own media encoders make."""
    config = _read_json(path / "config.json")
    text = config.get("text_config")
    sizes = [config.get("vocab_size"), config.get("padded_vocab_size")]
    sizes += [text.get("vocab_size")] if isinstance(text, dict) else []
    size = next((size for size in sizes if type(size) is int and size > 0), MAX_VOCABULARY)
    if with_added > MAX_VOCABULARY:
        raise CheckpointError(
            f"{path}: the tokenizer has a token with id {with_added - 1}, must be below {MAX_VOCABULARY}"
        )
    if found > size:
        raise CheckpointError(
            f"{path}: the tokenizer has {found} tokens, config.json says vocab_size {size}: "
            "it is the tokenizer of another model"
        )


def _from_vocab_and_merges(path: Path, config: Mapping[str, Any]) -> Backend:
    vocab, merges = path / "vocab.json", path / "merges.txt"
    name = _RULES_BY_CLASS.get(str(config.get("tokenizer_class")))
    rule = pretokenizers.rule(name) if name else None
    if rule is None or not (is_there(vocab) and is_there(merges)):
        if not is_there(path / "config.json"):
            raise ModelNotFound(
                f"{path} holds no model: neither config.json nor tokenizer.json; give a folder in Hugging Face's "
                "layout, or a GGUF file"
            )
        return _read_backend(*kept(path, lambda: converted_backend(path).to_str().encode()))
    for file in (vocab, merges):
        check_regular(file, MAX_TOKENIZER_BYTES)
    with library_errors(f"{vocab} and {merges} cannot be read"):
        backend = Backend(BPE.from_file(str(vocab), str(merges)))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_tokens(path: Path, backend: Backend, config: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json or added_tokens.json lists, under the ids they name there."""
    known = backend.get_added_tokens_decoder()
    source = path / "added_tokens.json"
    listed = {
        _added_id(source, token_id): AddedToken(text, normalized=False, special=False)
        for text, token_id in _read_json(source).items()
    }
    source = path / "tokenizer_config.json"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{source}: added_tokens_decoder must be an object, got {shown(decoder)}")
    for token_id, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise CheckpointError(f"{source}: added_tokens_decoder[{shown(token_id)}] must have a text as its content")
        flags = {key: bool(entry.get(key, False)) for key in _TOKEN_FLAGS}
        listed[_added_id(source, token_id)] = AddedToken(content, **flags)
    for token_id in sorted(set(listed) - set(known)):
        token = listed[token_id]
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{path}: added token {token.content!r} has id {token_id} in tokenizer_config.json, "
                f"but comes out as {backend.token_to_id(token.content)}"
            )


def _check_added(source: str, data: bytes, backend: Backend) -> None:
    """Raises CheckpointError for an added token whose id lies beyond the vocabulary: the library gives it another."""
    if (begin := _ADDED.search(data)) is None:
        return
    text = data[begin.end() - 1 :].decode("utf-8", "replace")
    size = backend.get_vocab_size(with_added_tokens=True)
    for entry in json.JSONDecoder().raw_decode(text)[0]:
        if entry["id"] >= size and entry["id"] != backend.token_to_id(entry["content"]):
            raise CheckpointError(
                f"{source}: added token {shown(entry['content'])} has id {entry['id']}, beyond the {size} tokens"
            )


def _added_id(source: Path, value: object) -> int:
    """The id of an added token, a number or (as a key) its digits. Raises CheckpointError for what is none."""
    digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
    token_id = int(value) if digits and isinstance(value, str) else value
    if type(token_id) is not int or not 0 <= token_id < MAX_VOCABULARY:
        raise CheckpointError(
            f"{source}: an added token has the id {shown(value)}, must be an integer from 0 to {MAX_VOCABULARY - 1}"
        )
    return token_id


def _wrapping(
    backend: Backend, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids before and after a prompt: from the config's explicit flags, else from the post-processor."""
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        prefix = (bos,) if config.get("add_bos_token") and bos is not None else ()
        return prefix, (eos,) if config.get("add_eos_token") and eos is not None else ()
    if backend.post_processor is None:
        return (), ()
    encoding = backend.encode("a", add_special_tokens=True)
    own = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    if not own:
        return tuple(encoding.ids), ()
    return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])


def _named_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token … as texts; a token may be a string or an object with its content."""
    values = _read_json(path / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    named = {}
    for key in _NAMED_TOKENS:
        value = values.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            named[key] = value
    return named


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if is_there(file):
        return read_text(file, MAX_TEMPLATE_BYTES)
    value = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = (entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default")
        value = next((entry.get("template") for entry in named), None)
    if isinstance(value, str) and len(value) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{path}: chat_template has {len(value)} characters, must have at most {MAX_TEMPLATE_BYTES}"
        )
    return value if isinstance(value, str) else None


def _template(source: str, named: Mapping[str, str]) -> ChatTemplate:
    extra = {key: text for key, text in named.items() if key not in ("bos_token", "eos_token")}
    return ChatTemplate(source, named.get("bos_token", ""), named.get("eos_token", ""), extra)


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the file's content, empty when there is no such file."""
    return read_json_object(file) if is_there(file) else {}
