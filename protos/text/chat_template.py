"""Chat templates: Jinja as model publishers write it, compiled and rendered in a process where it can do no harm.

The names and settings that a template may count on are those of Hugging Face's `apply_chat_template`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text.helper_process import HelperEnded, HelperPool
from allspan.protos.text.written import CUT, Written, with_own

MAX_RENDERED_CHARS = 4 * 2**20
RENDER_S = 5.0
"""Most seconds that the rendering of a conversation may take."""
MEMORY_BYTES = 2**28
"""Most memory that a rendering may take."""
CHILDREN = 4
"""Most processes that render, so that a slow conversation does not hold up the others."""

renderers = HelperPool("allspan.protos.text.template_child", (str(MEMORY_BYTES),), CHILDREN)
"""The processes that render the templates of this process."""


class TemplateTooSlow(InvalidRequest):
    """The template was still at it when its time was over."""


class ChatTemplate:
    """A template with the model's begin- and end-of-sequence texts. Threads may share it."""

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", extra: Mapping[str, str] | None = None
    ) -> None:
        """`extra`: further special tokens that the template may name."""
        self.source = source
        self._id = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._specials = {**(extra or {}), "bos_token": bos_token, "eos_token": eos_token}

    @property
    def published(self) -> str:
        """The source as others may read it: without the marks that only this program knows."""
        return self.source.replace(CUT, "")

    @cached_property
    def error(self) -> str | None:
        """Why the source is no valid Jinja, in one line; None when it is. A model with a bad template can still
        complete text, so only rendering fails."""
        try:
            self._ask(None, {}, RENDER_S)
        except InvalidRequest as error:
            return error.message.partition("; use completions")[0]
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        within_s: float = RENDER_S,
        **kwargs: Any,
    ) -> Written:
        """The prompt's text, which knows what of it the template wrote. Raises InvalidRequest, in one line, for
        whatever the template objects to, and TemplateTooSlow when it takes longer than `within_s` seconds."""
        return self._ask(messages, {**kwargs, "add_generation_prompt": add_generation_prompt}, within_s)

    def _ask(
        self, messages: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any], within_s: float
    ) -> Written:
        question = {
            "id": self._id,
            "messages": messages if messages is None else list(messages),
            "own": [
                (i, key, value.own)
                for i, message in enumerate(messages or ())
                for key, value in message.items()
                if isinstance(value, Written)
            ],
            "specials": self._specials,
            "variables": variables,
            "max_chars": MAX_RENDERED_CHARS,
            "within_s": within_s,
        }
        try:
            answer = renderers.ask(question, within_s)
            if "unknown" in answer:
                answer = renderers.ask({**question, "source": self.source}, within_s)
        except TimeoutError as error:
            raise TemplateTooSlow(
                f"the chat template takes too long over these messages: more than {within_s:g} s", "messages"
            ) from error
        except HelperEnded as error:
            raise _refused("it takes too much memory or nests too deeply") from error
        except (TypeError, ValueError, RecursionError) as error:  # of json
            raise InvalidRequest(f"messages must be what JSON can say: {error}", "messages") from error
        if "error" in answer:
            raise InvalidRequest(
                f"the chat template is no valid Jinja: {answer['error']}; use completions or give --chat-template FILE",
                "messages",
            )
        if "problem" in answer:
            raise _refused(answer["problem"])
        if "memory" in answer:
            raise _refused(f"it takes more than {MEMORY_BYTES} bytes of memory over them")
        if "chars" in answer:
            raise InvalidRequest(f"messages render to more than {MAX_RENDERED_CHARS} characters, the limit", "messages")
        return with_own(answer["text"], answer["own"])


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template refuses messages: {problem}", "messages")
