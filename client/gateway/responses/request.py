"""A request for /v1/responses, as the conversation that answers it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.extra_fields import check_extras
from allspan.client.gateway.openai.schemas import RequestBody
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512

# Fields that this server does not do → the values with which they do nothing, and what does instead.
_NEVER: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "ask with stream, or keep the connection open"),
    "conversation": ((), "go on with previous_response_id, or give all items in input"),
    "prompt": ((), "no prompts are kept here; give its text in instructions and input"),
    "truncation": (("disabled",), "leave items out of input, or set truncate_prompt_tokens"),
    "context_management": (([],), "leave items out of input"),
    "moderation": ((), "nothing is moderated here"),
}
# Fields of /v1/chat/completions under whose names nothing is asked here.
_ELSEWHERE = frozenset(
    (
        *("messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "response_format", "prompt_logprobs"),
        *("functions", "function_call", "reasoning_effort", "verbosity", "audio", "modalities"),
    )
)
_OF_CHAT = frozenset(ChatRequest.model_fields) - _ELSEWHERE
_FORMATS = ("text", "json_object", "json_schema")


class TextConfig(BaseModel):
    """The format of the output text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(BaseModel):
    """The amount of reasoning."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(BaseModel):
    """There is no padding against traffic analysis, either way."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: bool | None = None


class ResponsesRequest(RequestBody):
    """POST /v1/responses. What it does not name goes on to the conversation, which knows vLLM's fields and this
    project's own, or refuses them."""

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self, limits: LimitsConfig) -> None:
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise InvalidRequest(f"metadata has {len(metadata)} entries, at most {MAX_METADATA}", "metadata")
        for key, value in metadata.items():
            if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_CHARS:
                raise InvalidRequest(
                    f"metadata[{key[:MAX_METADATA_KEY_CHARS]!r}] is too long: a key has at most "
                    f"{MAX_METADATA_KEY_CHARS} characters, a value {MAX_METADATA_CHARS}",
                    "metadata",
                )
        extras = self.model_extra or {}
        for name, value in extras.items():
            if name in _ELSEWHERE:
                raise InvalidRequest(f"{name} is not a field that this endpoint knows", name)
            accepted, why = _NEVER.get(name, ((value,), ""))
            if value is not None and not any(value == item and type(value) is type(item) for item in accepted):
                raise InvalidRequest(f"{name} is {_short(value)}: not supported; {why}", name)
        known = self.known | {name: extras.get(name) is not None for name in _OF_CHAT}
        unknown = {name: value for name, value in extras.items() if name not in _OF_CHAT and name not in _NEVER}
        check_extras(unknown, known, limits.strict)

    def conversation(self, messages: list[Json]) -> Json:
        """Returns the equivalent body for /v1/chat/completions."""
        body = {name: value for name, value in (self.model_extra or {}).items() if name in _OF_CHAT}
        body |= {"model": self.model, "messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            body["tools"] = [_tool(place, tool) for place, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            body["tool_choice"] = _tool_choice(self.tool_choice)
        if self.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = self.parallel_tool_calls
        if self.text is not None and self.text.format is not None:
            body["response_format"] = _format(self.text.format)
        if self.text is not None and self.text.verbosity is not None:
            body["verbosity"] = self.text.verbosity
        if self.reasoning is not None and self.reasoning.effort is not None:
            body["reasoning_effort"] = self.reasoning.effort
        return body


def _tool(place: int, tool: Any) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise InvalidRequest(
            f"tools[{place}] is of type {_short(kind)}: only functions that the caller runs are supported", "tools"
        )
    return {"type": "function", "function": _without(tool, "type")}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": _without(choice, "type")}
    if kind == "allowed_tools":
        named = choice.get("tools")
        if not isinstance(named, list):
            raise InvalidRequest(f"tool_choice.tools is {_short(named)}, must be a list of functions", "tool_choice")
        tools = [_tool_choice(tool) if isinstance(tool, dict) else tool for tool in named]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise InvalidRequest(
        f"tool_choice is of type {_short(kind)}, must be 'function', 'allowed_tools', or a word: none, auto, required",
        "tool_choice",
    )


def _format(form: Json) -> Json:
    kind = form.get("type")
    if kind not in _FORMATS:
        raise InvalidRequest(f"text.format.type is {_short(kind)}, must be one of {', '.join(_FORMATS)}", "text")
    return {"type": kind, "json_schema": _without(form, "type")} if kind == "json_schema" else form


def _without(entry: Json, name: str) -> Json:
    return {key: value for key, value in entry.items() if key != name}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
