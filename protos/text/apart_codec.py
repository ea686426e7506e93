"""Tokenizers whose rules nobody knows encode in a child process, where a regular expression that explodes or panics
costs a bounded time; those with the published rules of known models encode here.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from allspan.protos.api.errors import CheckpointError, InvalidRequest
from allspan.protos.text.helper_process import HelperEnded, HelperPool
from allspan.protos.text.tokenizers.pretokenizers import published_expressions
from allspan.protos.text.tokenizers.tokenizer import Codec

ENCODE_S = 5.0
"""Most seconds that a text, or the rules themselves, may take."""
MEMORY_BYTES = 2 << 30
MAX_STEPS = 16
"""Steps of a normaliser or pre-tokeniser that encode here."""
MAX_GROWTH = 4
"""Characters by which a known step may replace one."""

encoders = HelperPool("allspan.protos.text.encoder_child", (str(MEMORY_BYTES),))
"""The processes that encode for this process."""

_EXPRESSION = re.compile(rb'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")')
_ESCAPED_LETTER = re.compile(rb"\\u00(?:[46][1-9a-fA-F]|[57][0-9aA])")
"""No tool writes an ASCII letter so, but it could hide an expression."""
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "Replace", "ByteLevel")
_PRE_TOKENIZERS = ("Split", "ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit")


class ApartCodec:
    """A codec that encodes in a child process, so that `encode` may wait."""

    is_apart = True

    def __init__(self, codec: OwnCodec, source: str) -> None:
        """`source`: the tokenizer.json, with all added tokens. All but the encoding is that of `codec`."""
        self.vocab_size = codec.vocab_size
        self.control = codec.control
        self.piece = codec.piece
        self._make_framed = codec.framed
        self._plain = Rules(source)
        self._framed: tuple[Rules, dict[int, int]] | None = None

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Raises InvalidRequest for a text that the rules take too long over, or fail at."""
        return self._plain.encode(text, parse_special)

    def encode_framed(self, text: str) -> list[int]:
        if self._framed is None:
            backend, meant = self._make_framed()
            self._framed = Rules(backend.to_str()), meant
        rules, meant = self._framed
        ids = (meant.get(token_id, token_id) for token_id in rules.encode(text, True))
        return [token_id for token_id in ids if token_id >= 0]


class OwnCodec(Codec, Protocol):
    """A codec of a `tokenizers` tokenizer."""

    def framed(self) -> tuple[Backend, dict[int, int]]:
        """See `allspan.protos.text.tokenizers.framed_backend`."""


class Rules:
    """A tokenizer.json that the child processes encode with."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._id = hashlib.sha256(source.encode()).hexdigest()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """See `ApartCodec.encode`."""
        try:
            answer = self.ask(text, parse_special)
        except TimeoutError as error:
            raise InvalidRequest(
                f"prompt takes the model's own tokenizer more than {ENCODE_S:g} s, the limit: send another text, or "
                "its token ids",
                "prompt",
            ) from error
        except HelperEnded as error:
            raise InvalidRequest("prompt takes the model's own tokenizer too much memory", "prompt") from error
        if "problem" in answer:
            raise InvalidRequest(f"prompt makes the model's own tokenizer fail: {answer['problem']}", "prompt")
        ids: list[int] = answer["ids"]
        return ids

    def ask(self, text: str, special: bool, wrap: bool = False) -> dict[str, Any]:
        """The child's answer. Raises TimeoutError and HelperEnded."""
        question = {"id": self._id, "text": text, "special": special, "wrap": wrap, "within_s": ENCODE_S}
        answer = encoders.ask(question, ENCODE_S)
        return encoders.ask({**question, "source": self._source}, ENCODE_S) if "unknown" in answer else answer


def check_rules(data: bytes, source: str) -> None:
    """Tries a tokenizer.json in a child process, unless its expressions are those of known models. Raises
    CheckpointError for one that cannot be loaded, or not encode a letter, within its limits."""
    found = {json.loads(match, strict=False) for match in _EXPRESSION.findall(data)}
    if found <= published_expressions() and not _ESCAPED_LETTER.search(data):
        return
    try:
        answer = Rules(data.decode("utf-8")).ask("a", True, wrap=True)
    except TimeoutError as error:
        raise CheckpointError(
            f"{source}: its rules take more than {ENCODE_S:g} s over a letter, the limit: use the publisher's file"
        ) from error
    except HelperEnded as error:
        raise CheckpointError(
            f"{source}: its rules take more than {MEMORY_BYTES} bytes of memory: use the publisher's file"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source} cannot be read: it is not UTF-8") from error
    if "problem" in answer:
        raise CheckpointError(f"{source} cannot be read: {answer['problem']}")


def is_known(backend: Backend) -> bool:
    """Whether every step is one whose time and memory grow with the text alone: those of known models."""
    model = backend.model
    if (
        not isinstance(model, BPE)
        or len(model.end_of_word_suffix or "") + len(model.continuing_subword_prefix or "") > 32
    ):
        return False
    normalizers, cuts = _steps(backend.normalizer, "normalizers"), _steps(backend.pre_tokenizer, "pretokenizers")
    if len(normalizers) > MAX_STEPS or len(cuts) > MAX_STEPS:
        return False
    grown = [step for step in normalizers if len(step.get("content") or step.get("prepend") or "") > 1]
    return len(grown) <= 1 and all(map(_is_known_normalizer, normalizers)) and all(map(_is_known_cut, cuts))


def _steps(part: Any, several: str) -> list[dict[str, Any]]:
    """The steps that a part consists of, as tokenizer.json describes them."""
    if part is None:
        return []
    described: dict[str, Any] = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = described[several] if described["type"] == "Sequence" else [described]
    return steps


def _is_known_normalizer(step: dict[str, Any]) -> bool:
    text = step.get("content") or step.get("prepend") or ""
    return step["type"] in _NORMALIZERS and len(text) <= MAX_GROWTH and _is_known_pattern(step)


def _is_known_cut(step: dict[str, Any]) -> bool:
    return step["type"] in _PRE_TOKENIZERS and _is_known_pattern(step)


def _is_known_pattern(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern") or {}
    return "Regex" not in pattern or pattern["Regex"] in published_expressions()
