"""Turns prompts and conversations into checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allspan.client.gateway.chat.messages import characters
from allspan.client.gateway.chat.setup import ChatSetup
from allspan.client.gateway.chat.template import Rendering
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.offload import INLINE_CHARS, off_loop
from allspan.client.gateway.served_model import ServedModel
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.prompts import check_ids, check_length
from allspan.protos.text import Tokenizer
from allspan.protos.text.written import Written


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options for turning a text, token ids or a conversation into a prompt. None: as the endpoint does by
    default."""

    add_special_tokens: bool | None = None
    """Adds the special tokens that the model expects around a prompt; a conversation's template has done so already."""
    parse_special: bool = True
    """Reads the texts of special tokens in a text as those tokens; a conversation's template alone writes them."""
    last_tokens: int | None = None
    """Keeps this many of the prompt's last tokens; -1: as many as leave room for `max_tokens`."""
    max_tokens: int | None = None
    add_generation_prompt: bool = True
    """A conversation ends with the beginning of the assistant's turn."""
    only_counted: bool = False
    """The prompt is not going to run, so that it may be empty or longer than the context."""

    def truncated(self, ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        """The ids that are kept. Raises InvalidRequest for a number of tokens that cannot be."""
        keep = self.last_tokens
        if keep is None:
            return ids
        most = max_model_len - 1
        if keep != -1 and not 1 <= keep <= most:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {keep}, must be -1 (as many as fit) or from 1 to {most}",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max_model_len - min(max(self.max_tokens or 1, 1), most)
        return ids[-keep:]


AS_USUAL = PromptOptions()


class PromptEncoder:
    """Tokenises prompts, and checks their length and their token ids.

    `chat`: how conversations are rendered. `max_chars`: longest text that is tokenised.
    """

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, config: GatewayConfig) -> None:
        self.chat = ChatSetup.of(tokenizer, config.chat)
        self.max_chars = config.limits.max_prompt_chars or max(65536, 64 * model.max_model_len)
        self._tokenizer = tokenizer
        self._model = model

    async def encode(
        self, prompt: str | Sequence[int], field: str = "prompt", options: PromptOptions = AS_USUAL
    ) -> Sequence[int]:
        """The token ids of a prompt. Raises InvalidRequest naming what does not fit."""
        if isinstance(prompt, str):
            self._check_chars(len(prompt), field)
            if "\0" in prompt:
                raise InvalidRequest(f"{field} has a NUL character at {prompt.index(chr(0))}", field)
            if not prompt and not options.only_counted:
                raise InvalidRequest(f"{field} is empty, must have at least one token", field)
            special = options.add_special_tokens is not False
            text = prompt if options.parse_special else Written(prompt)
            size = len(prompt) if not self._tokenizer.is_apart else INLINE_CHARS + 1
            ids: Sequence[int] = await off_loop(size, self._tokenizer.encode, text, special)
        else:
            if len(prompt) > self.max_chars:
                raise InvalidRequest(f"{field} has {len(prompt)} entries, at most {self.max_chars}", field)
            ids = prompt
        ids = options.truncated(ids, self._model.max_model_len)
        if not options.only_counted:
            check_length(len(ids), self._model, field)
        check_ids(ids, self._model, field)
        return ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: PromptOptions = AS_USUAL,
        how: Rendering | None = None,
    ) -> Sequence[int]:
        """The token ids of a conversation, by the chat template. Raises InvalidRequest when there is none."""
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                f"model {self._model.name!r} has no chat template (a base model?): use completions or a text prompt, "
                "or give the server one with --chat-template",
                "messages",
            )
        how = how or Rendering(generation_prompt=options.add_generation_prompt)
        self._check_chars(characters(messages) + how.characters, "messages")
        special = bool(options.add_special_tokens)
        ids: Sequence[int] = await self.chat.encode(messages, how, special)
        ids = options.truncated(ids, self._model.max_model_len)
        if not options.only_counted:
            check_length(len(ids), self._model, "messages")
        check_ids(ids, self._model, "messages")
        return ids

    def _check_chars(self, chars: int, field: str) -> None:
        if chars > self.max_chars:
            raise InvalidRequest(f"{field} has {chars} characters, at most {self.max_chars}", field)
