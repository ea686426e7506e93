"""A chat model's tokenizer that a test can read: token id = byte, and a few special tokens above."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.protos.text import Tokenizer
from allspan.protos.text.chat_template import ChatTemplate
from allspan.protos.text.tokenizers.control import BREAK, FRAME, ControlTexts

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
EOS = 257
VOCAB_SIZE = 256 + len(SPECIALS)
TURN = "<|{{ m.role }}|>{{ m.content }}"
TEMPLATE = f"{{% for m in messages %}}{TURN}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"


class ChatCodec:
    """UTF-8 bytes, with special tokens from 256 on."""

    def __init__(self, specials: tuple[str, ...] = SPECIALS) -> None:
        self._specials = specials
        self.vocab_size = 256 + len(specials)
        self.control = ControlTexts({text: 256 + i for i, text in enumerate(specials)})

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return self._ids(text, self._specials if parse_special else ())

    def encode_framed(self, text: str) -> list[int]:
        return self._ids(text.replace(BREAK, ""), [f"{FRAME}{special}{FRAME}" for special in self._specials])

    def _ids(self, text: str, specials: Sequence[str]) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            special = next((s for s in specials if text.startswith(s, at)), None)
            ids += [256 + specials.index(special)] if special else list(text[at].encode())
            at += len(special) if special else 1
        return ids

    def piece(self, token_id: int) -> bytes:
        if token_id >= self.vocab_size:
            return b""
        return bytes([token_id]) if token_id < 256 else self._specials[token_id - 256].encode()


def chat_tokenizer(template: str | None = TEMPLATE, *more_specials: str) -> Tokenizer:
    codec = ChatCodec((*SPECIALS, *more_specials))
    return Tokenizer(
        codec=codec,
        name="bytes",
        special_ids=frozenset(range(256, codec.vocab_size)),
        bos_token_id=256,
        eos_token_ids=(EOS,),
        chat_template=ChatTemplate(template) if template else None,
    )
