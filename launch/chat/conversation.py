"""One conversation: its messages and the settings of its answers, which slash commands change."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allspan.client.transport.public import Message
from allspan.launch.chat.model_client import ModelClient, given_fields
from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.api.sampling import SAMPLING_FIELDS, SamplingParams
from allspan.protos.cluster.cluster_file import write_atomically
from allspan.protos.config.flags import nearest

_ROLES = ("system", "user", "assistant")
_NOT_SET = ("grammar", "logit_bias", "bad_words_ids", "stop_words_ids", "logprobs", "prompt_logprobs")
"""Fields of SamplingParams that a line of text cannot give, or whose effect is not shown."""


@dataclass
class Conversation:
    """The messages so far, the last of them the assistant's, or a question without an answer yet."""

    client: ModelClient
    namespace: argparse.Namespace
    """The flags; /set writes into it."""
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Asks a question and yields the answer's text. An answer that is broken off counts as far as it came; one
        that never began is forgotten with its question."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def again(self) -> Generator[str, None, None]:
        """Yields another answer in place of the last, which stays if the new one never begins. ConfigError when nothing
        was asked."""
        is_answered = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        asked = self.messages[:-1] if is_answered else self.messages
        if not asked or asked[-1]["role"] != "user":
            raise ConfigError("there is no answer to make again")
        return self._answer(asked)

    def _answer(self, asked: list[Message]) -> Generator[str, None, None]:
        """Yields the answer's text. The messages become `asked` and the answer when it ends, or breaks off with some
        text; until then they stay as they are."""
        parts: list[str] = []
        is_whole = False
        try:
            with closing(self.client.chat(asked)) as pieces:
                for piece in pieces:
                    parts.append(piece.text)
                    yield piece.text
            is_whole = True
        finally:
            if is_whole or any(parts):
                self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    @property
    def system(self) -> str:
        """The system message, which stands first; "" without one. Setting it keeps the rest."""
        first = self.messages[0] if self.messages else {"role": "", "content": ""}
        return first["content"] if first["role"] == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        rest = self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def set(self, name: str, text: str) -> None:
        """Sets a field of SamplingParams for the next answers; "default" unsets it. Raises InvalidRequest."""
        name = name.lstrip("-").replace("-", "_")
        names = [name for name in SAMPLING_FIELDS if name not in _NOT_SET]
        if name not in names:
            raise InvalidRequest(f"there is no field {name!r}{nearest(name, names)}; fields: {', '.join(names)}", name)
        if text == "default":
            setattr(self.namespace, name, None)
            return
        value = _value(text)
        if name == "stop":
            value = (text,) if not isinstance(value, tuple) else value
        elif name.endswith("_ids") and not isinstance(value, tuple):
            value = tuple(_value(part) for part in text.split(","))
        checked = SamplingParams(**{name: value})
        setattr(self.namespace, name, getattr(checked, name))

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that are set."""
        return given_fields(self.namespace)

    def save(self, path: Path) -> None:
        """Writes the conversation to a file. ConfigError for a file that exists and holds something else, OSError."""
        if path.exists():
            _read(path)
        saved = {"model": self.client.model, "sampling": self.settings, "messages": self.messages}
        write_atomically(path, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Goes on with a conversation from a file; settings stay as they are. ConfigError, OSError."""
        self.messages = _read(path)


def _value(text: str) -> Any:
    """`0.5`, `true`, `[1, 2]`; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return {"yes": True, "on": True, "no": False, "off": False}.get(text.lower(), text)
    return tuple(value) if isinstance(value, list) else value


def _read(path: Path) -> list[Message]:
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        if not all(message["role"] in _ROLES and isinstance(message["content"], str) for message in messages):
            raise ValueError("a message has another role, or no text")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{os.fspath(path)} is no saved conversation: {error!r}") from None
    return [{"role": message["role"], "content": message["content"]} for message in messages]
