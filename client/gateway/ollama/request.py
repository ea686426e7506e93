"""The requests for /api/chat and /api/generate, as the conversation or completion that answers them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from allspan.client.gateway.ollama.messages import read_messages, refuse_images
from allspan.client.gateway.ollama.options import NAMES, read_options, response_format, thinking
from allspan.client.gateway.openai.renamed import renamed
from allspan.client.gateway.openai.schemas import RequestBody
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

_MESSAGES: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": {"type": ["string", "null"]},
        },
        "required": ["role"],
    },
}


class OllamaRequest(RequestBody):
    """The fields of both endpoints."""

    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: Any = None
    think: Any = None
    keep_alive: Any = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    def sampling(self, strict: bool) -> tuple[Json, int | None]:
        """Returns the fields that a conversation and a completion have in common, and the length of the output."""
        fields, most = read_options(self.options, strict)
        if (form := response_format(self.format)) is not None:
            fields["response_format"] = form
        return fields, most


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: list[Any] | None = Field(None, json_schema_extra=_MESSAGES)
    tools: list[Any] | None = None

    def conversation(self) -> Json:
        """Returns the conversation's own fields for /v1/chat/completions; InvalidRequest names what does not fit."""
        body: Json = {"messages": read_messages(self.messages or [])}
        return body | thinking(self.think) | ({"tools": self.tools} if self.tools else {})


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: str | None = Field(None, json_schema_extra={"title": "Prompt"})
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    def conversation(self) -> Json:
        """Returns the conversation that has the prompt as its only question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*system, {"role": "user", "content": self.prompt}]} | thinking(self.think)

    def refuse(self) -> None:
        """Raises InvalidRequest for what no completion here does."""
        refuse_images("images", self.images, "images")
        if self.suffix:
            raise InvalidRequest(
                "suffix is given: write the prompt with the model's own fill-in-the-middle tokens, with raw", "suffix"
            )


def in_our_words(error: InvalidRequest) -> InvalidRequest:
    """Returns an error of the conversation with Ollama's names of fields."""
    return renamed(error, NAMES)
