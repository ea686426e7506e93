"""Vocabularies that are lists of byte strings by rank (tiktoken's files, Mistral's Tekken), as a tokenizer.json.

tiktoken merges the adjacent pair whose union has the lowest rank, and takes a word that is a token as a whole at once.
Byte-level BPE does the same when each token's last merge is written down: the two tokens that are left of it when only
pairs of lower rank are merged.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import parse_object, shown
from allspan.protos.model_files.limits import MAX_CONTROL_TOKENS, MAX_VOCABULARY
from allspan.protos.text.tokenizers.byte_level import BYTES

MAX_RANKED_BYTES = 1024
"""Bytes of one token; known ones reach 128."""
MAX_MERGING = 1 << 26
"""The squares of the tokens' lengths, summed up: what finding their merges costs. Known vocabularies have 1 << 24."""

_LETTERS = {byte: letter for letter, byte in BYTES.items()}
_LINES_SHOWN = 64
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens of files that do not list them, which are older than 2025."""


@dataclass(frozen=True)
class RankedVocabulary:
    """Tokens by their ids, the more frequent first, and special tokens by theirs. `expression` cuts a text into words,
    `composes` says that characters are composed before (NFC)."""

    ranks: Mapping[bytes, int]
    special: Mapping[str, int]
    expression: str
    composes: bool = False
    prefix: tuple[str, ...] = ()
    """Special tokens that begin every prompt."""

    def tokenizer_json(self, source: str) -> bytes:
        """The same as a tokenizer.json. CheckpointError naming `source` for one that no text could be encoded with."""
        for byte in range(256):
            if bytes([byte]) not in self.ranks:
                raise CheckpointError(f"{source} has no token for the byte {byte:#04x}, must have one for each")
        cost = sum(len(token) ** 2 for token in self.ranks)
        longest = max(map(len, self.ranks))
        if longest > MAX_RANKED_BYTES or cost > MAX_MERGING:
            raise CheckpointError(
                f"{source} has tokens of up to {longest} bytes, {cost} in squares together; must be at most "
                f"{MAX_RANKED_BYTES} and {MAX_MERGING}"
            )
        taken = set(self.ranks.values())
        if clash := next((text for text, i in self.special.items() if i in taken), None):
            raise CheckpointError(f"{source}: special token {clash[:64]!r} has the id of another token")
        return json.dumps(self._described(), ensure_ascii=False).encode()

    def _described(self) -> dict[str, Any]:
        texts = {token: "".join(map(_LETTERS.__getitem__, token)) for token in self.ranks}
        vocabulary = {texts[token]: i for token, i in self.ranks.items()} | dict(self.special)
        merges = [
            [texts[left], texts[right]]
            for token in sorted(self.ranks, key=self.ranks.__getitem__)
            if len(token) > 1 and (pair := _last_merge(token, self.ranks)) is not None
            for left, right in (pair,)
        ]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        cut = {"type": "Split", "pattern": {"Regex": self.expression}, "behavior": "Isolated", "invert": False}
        to_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": text, **flags} for text, i in self.special.items()],
            "normalizer": {"type": "NFC"} if self.composes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, to_letters]},
            "post_processor": self._wrapping() if self.prefix else None,
            "decoder": to_letters,
            "model": {"type": "BPE", "ignore_merges": True, "vocab": vocabulary, "merges": merges},
        }

    def _wrapping(self) -> dict[str, Any]:
        before = [{"SpecialToken": {"id": text, "type_id": 0}} for text in self.prefix]
        single = [*before, {"Sequence": {"id": "A", "type_id": 0}}]
        known = {text: {"id": text, "ids": [self.special[text]], "tokens": [text]} for text in self.prefix}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def read_tiktoken(data: bytes, source: str) -> dict[bytes, int]:
    """The tokens of a file with one a line: base64 of its bytes, a space, its rank. Raises CheckpointError, also where
    the ranks are not the numbers from 0 on, each once: they are ids, and those of the special tokens follow them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        encoded, _, rank = line.partition(b" ")
        if not rank.isdigit() or len(rank) > 9:
            raise CheckpointError(
                f"{source}: line {number} is {shown(line[:_LINES_SHOWN].decode('utf-8', 'replace'))}, must be a token "
                "in base64, a space and its rank"
            )
        _add(ranks, encoded, int(rank), f"{source}: line {number}")
    if not ranks:
        raise CheckpointError(f"{source} has no tokens")
    for expected, found in enumerate(sorted(ranks.values())):
        if found != expected:
            wrong = f"the rank {found} twice" if found < expected else f"no token of rank {expected}"
            raise CheckpointError(f"{source} has {wrong}, must have each from 0 to {len(ranks) - 1} once")
    return ranks


def read_tekken(data: bytes, source: str) -> RankedVocabulary:
    """The vocabulary of a `tekken.json`. Raises CheckpointError."""
    values = parse_object(data, source)
    config = values.get("config")
    expression = config.get("pattern") if isinstance(config, dict) else None
    entries = values.get("vocab")
    if not isinstance(config, dict) or not isinstance(expression, str) or not isinstance(entries, list):
        raise CheckpointError(f"{source} must have config.pattern (a text) and vocab (a list)")
    num_special = _size(config, "default_num_special_tokens", source, MAX_CONTROL_TOKENS)
    num_tokens = _size(config, "default_vocab_size", source, MAX_VOCABULARY)
    if not num_special < num_tokens <= num_special + len(entries):
        raise CheckpointError(
            f"{source}: config.default_vocab_size is {num_tokens}, must be more than {num_special} (special ones) "
            f"and at most {num_special + len(entries)} (with those of vocab)"
        )
    ranks: dict[bytes, int] = {}
    for i, entry in enumerate(entries[: num_tokens - num_special]):
        encoded = entry.get("token_bytes") if isinstance(entry, dict) else None
        if not isinstance(encoded, str) or not encoded.isascii() or entry.get("rank", i) != i:
            raise CheckpointError(f"{source}: vocab[{i}] must have its token_bytes in base64 and the rank {i}")
        _add(ranks, encoded.encode(), i + num_special, f"{source}: vocab[{i}]")
    special = _special(values.get("special_tokens"), num_special, source)
    return RankedVocabulary(ranks, special, expression, prefix=("<s>",) if "<s>" in special else ())


def _special(listed: Any, count: int, source: str) -> dict[str, int]:
    """The texts of Tekken's special tokens, which have the first ids; those that it does not list have a number."""
    texts = {i: f"<SPECIAL_{i}>" for i in range(count)}
    if not isinstance(listed, list | None):
        raise CheckpointError(f"{source}: special_tokens must be a list, got {shown(listed)}")
    entries = listed or [{"rank": i, "token_str": name} for i, name in enumerate(_TEKKEN_SPECIAL[:count])]
    for entry in entries:
        rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
        if type(rank) is not int or not 0 <= rank < count or not isinstance(text, str) or not text:
            raise CheckpointError(
                f"{source}: special_tokens has {shown(entry)}, must have a rank below {count} and a text"
            )
        texts[rank] = text
    if len(set(texts.values())) < count:
        raise CheckpointError(f"{source}: special_tokens has a text twice")
    return {text: i for i, text in texts.items()}


def _size(config: Mapping[str, Any], key: str, source: str, most: int) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(f"{source}: config.{key} is {shown(value)}, must be an integer from 0 to {most}")
    return value


def _add(ranks: dict[bytes, int], encoded: bytes, rank: int, place: str) -> None:
    try:
        token = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"{place} has a token that is no base64: {error}") from error
    if not token or token in ranks:
        raise CheckpointError(f"{place} has {'a token that occurs before' if token else 'an empty token'}")
    if rank >= MAX_VOCABULARY:
        raise CheckpointError(f"{place} has the rank {rank}, must be below {MAX_VOCABULARY}")
    ranks[token] = rank


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that are left of a token when only pairs of lower rank are merged; None where more are left: then
    it occurs as a whole word alone."""
    parts: Sequence[bytes] = [token[i : i + 1] for i in range(len(token))]
    most = ranks[token]
    while len(parts) > 2:
        best, at = most, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], most)
            if rank < best:
                best, at = rank, i
        if at < 0:
            return None
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]
    return parts[0], parts[1]
