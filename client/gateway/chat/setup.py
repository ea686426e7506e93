"""The chat settings of one gateway: the template, and its models' formats of tool calls and of reasoning."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspan.client.gateway.chat.formats import FORMATS, CallFormat, format_of_template
from allspan.client.gateway.chat.harmony import FINAL
from allspan.client.gateway.chat.reader import Reading
from allspan.client.gateway.chat.template import RESERVED, Conversations, Rendering, traits_of
from allspan.client.gateway.chat.thinking import TAGS, Tags, tags_of_template
from allspan.client.gateway.config import ChatConfig
from allspan.client.gateway.offload import BoundedThreads
from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.text import Tokenizer
from allspan.protos.text.chat_template import CHILDREN, RENDER_S
from allspan.protos.text.written import CUT, Written, written

logger = logging.getLogger("allspan.gateway")

MAX_VARIABLE_CHARS = 256
MOST_WAITING = 4096
WAIT_S = 30.0
_THREADS = BoundedThreads("chat templates", CHILDREN, MOST_WAITING, WAIT_S)
"""The threads that wait for the processes that render, so that slow templates hold up nothing else."""
_TAIL_TOKENS = 8
"""Number of a prompt's last tokens that are searched for a tag that opens the reasoning."""


@dataclass(frozen=True)
class ChatSetup:
    """The chat settings, made once. Without a chat template nothing but `tokenizer` is of use."""

    tokenizer: Tokenizer
    conversations: Conversations | None
    form: CallFormat
    tags: Tags | None
    """The reasoning tags; None treats all of the output as the answer."""
    auto_tool_choice: bool
    """The model may decide by itself to call a tool."""
    variables: frozenset[str]
    """The template's variables that a request may set."""
    lead: str = ""
    """What the model writes before every answer, and is no part of it."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ChatConfig) -> ChatSetup:
        """Returns the settings of these flags; ConfigError for flags that do not go together."""
        if taken := RESERVED & set(config.allow_chat_template_kwargs):
            raise ConfigError(f"--allow-chat-template-kwargs has {min(taken)}, which no request may set")
        template = tokenizer.chat_template
        usable = template is not None and template.error is None
        traits = traits_of(template) if template is not None and usable else None
        source = template.source if template is not None else ""
        form = FORMATS.get(config.tool_call_parser) or format_of_template(source, traits is not None and traits.tools)
        tags = tags_of_template(source) if config.reasoning_parser == "auto" else TAGS.get(config.reasoning_parser)
        conversations = None
        if template is not None and traits is not None:
            conversations = Conversations(template, traits, form)
            openings = " or ".join(opening for opening, _ in tags.pairs) if tags else ""
            marks = f"begins with {openings}" if openings else "is not marked"
            place = "the chat template" if traits.tools else "a system message"
            text = "chat: %s describes tools to the model; its calls are parsed as %s; its reasoning %s"
            logger.info(text, place, form.name, marks)
        variables = frozenset(config.allow_chat_template_kwargs)
        space = " " if tokenizer.strips_leading_space else ""  # of a text that is encoded by itself
        lead = traits.lead.replace(CUT, space) if traits is not None else ""
        return cls(tokenizer, conversations, form, tags, config.enable_auto_tool_choice, variables, lead)

    def render(self, messages: Sequence[Mapping[str, Any]], how: Rendering, within_s: float = RENDER_S) -> Written:
        """The prompt's text. InvalidRequest for what the template does not take."""
        if self.conversations is None:  # says what is wrong with the template
            return self.tokenizer.render_chat(messages, how.generation_prompt)
        text = self.conversations.render(messages, how, within_s)
        if not how.think and self.tags and self.tags.marks:
            return text + written(FINAL) if how.generation_prompt and not how.continues else text
        if not how.think and (opened := self._opened(text)):
            closing = dict(self.tags.pairs)[opened] if self.tags else ""
            text = text.rstrip() + written(f"\n\n{closing}\n\n")
        return text

    async def encode(
        self, messages: Sequence[Mapping[str, Any]], how: Rendering, add_special_tokens: bool
    ) -> Sequence[int]:
        """The prompt's token ids. InvalidRequest for what the template does not take; QueueFull when other
        conversations keep this one waiting."""

        def encoded() -> Sequence[int]:
            return self.tokenizer.encode(self.render(messages, how, RENDER_S), add_special_tokens)

        return await _THREADS.run(encoded)

    def opened(self, token_ids: Sequence[int]) -> str:
        """The tag with which a prompt ends that has the model think already; "" where it does not."""
        return self._opened(self.tokenizer.decode(token_ids[-_TAIL_TOKENS:], skip_special_tokens=False))

    def _opened(self, prompt: str) -> str:
        end = prompt.rstrip()
        if self.tags and self.tags.marks and end.endswith(FINAL):
            return FINAL
        return next((opening for opening, _ in self.tags.pairs if end.endswith(opening)), "") if self.tags else ""

    def tokenizer_for(self, reading: Reading) -> Tokenizer:
        """The one that shows the marks which that reading looks for, should they be control tokens."""
        marks = list(reading.marks)
        marks += [mark for pair in reading.tags.pairs for mark in pair] if reading.tags else []
        marks += (
            [mark for region in reading.form.regions for mark in (region.open, region.close)] if reading.form else []
        )
        shown = {mark.encode() for mark in marks}
        special = self.tokenizer.special_ids
        kept = frozenset(token_id for token_id in special if self.tokenizer.codec.piece(token_id) not in shown)
        return self.tokenizer if len(kept) == len(special) else replace(self.tokenizer, special_ids=kept)

    def check_variables(self, given: Mapping[str, Any]) -> None:
        """Checks a request's template variables; InvalidRequest for one that no request may set, or not to such a
        value."""
        field = "chat_template_kwargs"
        for name, value in given.items():
            if name not in self.variables:
                allowed = ", ".join(sorted(self.variables)) or "none"
                raise InvalidRequest(
                    f"{field} has {name[:64]!r}, which this server does not let requests set (allowed: {allowed}; "
                    "the server's --allow-chat-template-kwargs says which)",
                    field,
                )
            if not isinstance(value, (str, bool, int, float, type(None))) or len(str(value)) > MAX_VARIABLE_CHARS:
                problem = f"must be a string of at most {MAX_VARIABLE_CHARS} characters, a number, a boolean or null"
                raise InvalidRequest(f"{field}.{name[:64]} is a {type(value).__name__}, {problem}", field)
