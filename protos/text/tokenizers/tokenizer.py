"""Text to token ids and back, the same for every kind of checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.text.chat_template import ChatTemplate
from allspan.protos.text.tokenizers.control import FramedCodec, written_ids
from allspan.protos.text.written import Written


class Codec(FramedCodec, Protocol):
    """The vocabulary's own part: no begin- or end-of-sequence token is added here."""

    vocab_size: int

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Returns token ids; the text of a special token becomes its id only if `parse_special`."""

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to the text, as UTF-8 (perhaps part of a character); empty for an unknown
        id."""


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer, immutable and safe to share between threads. Made by `load_tokenizer`."""

    codec: Codec
    name: str
    """The name of the model, for messages."""
    special_ids: frozenset[int] = frozenset()
    """Control tokens: not part of the text."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """The ids that end an answer, the tokenizer's own first."""
    prefix: tuple[int, ...] = ()
    """Ids put before a prompt (usually the begin-of-sequence id, or nothing)."""
    suffix: tuple[int, ...] = ()
    """Ids put after a prompt (nearly always nothing)."""
    strips_leading_space: bool = False
    """SentencePiece style: a text's first word carries a space that does not belong to the text."""
    chat_template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a text."""
        return self.codec.vocab_size

    @property
    def is_apart(self) -> bool:
        """Whether `encode` waits for another process, however short the text."""
        return bool(getattr(self.codec, "is_apart", False))

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another template (Jinja source). Raises ConfigError for bad Jinja."""
        ids = (self.bos_token_id, self.eos_token_ids[0] if self.eos_token_ids else None)
        bos, eos = ("" if i is None else self.codec.piece(i).decode("utf-8", "replace") for i in ids)
        template = ChatTemplate(source, bos, eos)
        if template.error is not None:
            raise ConfigError(template.error)
        return replace(self, chat_template=template)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Returns the token ids of a text.

        `add_special_tokens` wraps them as the model wants its prompts (usually: begin-of-sequence first; never a second
        one, should the text spell it out). `parse_special` reads the text of a special token ("<|im_end|>") as that
        token; False takes it letter by letter, but for tokens that a GGUF file or a folder calls no special ones.

        Of a `Written` text, such as `render_chat` gives, only the control tokens that a chat template wrote are read as
        such. `Written(text)` has none: it is for text that must not speak for the model.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"prompt has half a surrogate pair at character {error.start}, must be valid Unicode", "prompt"
            ) from error
        ids = written_ids(self.codec, text) if isinstance(text, Written) else self.codec.encode(text, parse_special)
        if not add_special_tokens:
            return ids
        prefix = self.prefix
        if prefix and tuple(ids[: len(prefix)]) == prefix:
            prefix = ()
        return [*prefix, *ids, *self.suffix]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, ids without a text are nothing."""
        data = b"".join(self.pieces(ids, skip_special_tokens))
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def pieces(self, ids: Iterable[int], skip_special_tokens: bool = True) -> Iterable[bytes]:
        """Returns the bytes that each token adds, in order."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return (self.codec.piece(token_id) for token_id in ids if token_id not in skipped)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> Written:
        """The prompt that the model's chat template makes of messages ({"role", "content"}, the oldest first), a string
        that knows what of it the template wrote.

        Further arguments are seen by the template. Raises InvalidRequest when there is no template, it refuses them, or
        it leaves out the `tools` that it is given.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                f"model {self.name} has no chat template; use completions or give --chat-template FILE", "messages"
            )
        text = self.chat_template.render(messages, add_generation_prompt, **kwargs)
        if kwargs.get("tools") and text == self.chat_template.render(
            messages, add_generation_prompt, **{**kwargs, "tools": None}
        ):
            raise InvalidRequest(
                f"the chat format of model {self.name} does not list tools; leave them out, say them in a message, "
                "or send them to /v1/chat/completions, which does so",
                "tools",
            )
        return text

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Returns the ids of the rendered chat. A template writes every special token itself, so nothing is added to
        it; the text of a special token in a message is text."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **kwargs), add_special_tokens=False)
