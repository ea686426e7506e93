"""A request for /v1/messages, as the conversation that answers it."""

from __future__ import annotations

import reprlib
from typing import Any

from pydantic import Field

from allspan.client.gateway.anthropic.content import read_conversation
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.extra_fields import check_extras, check_neutral
from allspan.client.gateway.openai.renamed import renamed
from allspan.client.gateway.openai.schemas import RequestBody
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

_SAME = ("temperature", "top_k", "top_p", "stream")
"""The fields that mean the same in a conversation."""
_NO_LOGPROBS = "an answer here has no logprobs; /v1/chat/completions has"
_NO_TOKEN_IDS = "an answer here has no token ids; /v1/chat/completions has"
_CONTINUED = "a last message of the assistant is continued, and no other"
_OPENAI: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "a request has one answer here; /v1/chat/completions gives several"),
    "stop": ((), "it is stop_sequences here"),
    "max_completion_tokens": ((), "it is max_tokens here"),
    "response_format": (({"type": "text"},), "it is output_config.format here"),
    "reasoning_effort": ((), "it is output_config.effort here, with thinking"),
    "include_reasoning": ((), "it is thinking here"),
    "separate_reasoning": ((True,), "thinking always has blocks of its own here"),
    "parallel_tool_calls": ((True,), "it is tool_choice.disable_parallel_tool_use here"),
    "logprobs": ((False,), _NO_LOGPROBS),
    "top_logprobs": ((0,), _NO_LOGPROBS),
    "prompt_logprobs": ((), _NO_LOGPROBS),
    "return_token_ids": ((False,), _NO_TOKEN_IDS),
    "return_tokens_as_token_ids": ((False,), _NO_TOKEN_IDS),
    "continue_final_message": ((), _CONTINUED),
    "add_generation_prompt": ((), _CONTINUED),
}
"""A conversation's fields that would change the answer, as in `extra_fields.NEVER`."""
_OF_CHAT = frozenset(ChatRequest.model_fields) - {*_OPENAI, "messages", "max_tokens", "stream_options"}
"""A conversation's fields that may be given here, too: vLLM's and this project's own."""
_INERT = frozenset(
    (
        *("betas", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "speed"),
        *("user_profile_id", "workspace_id"),
    )
)
"""Fields that change nothing here, beside those of `extra_fields`."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_BUDGETS = ((4096, "low"), (16384, "medium"))
"""Tokens of thinking below which it takes that effort."""
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice",
}
_PARTS = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "output_config.json_schema": "output_config.format",
}

_TEXT: Json = {"type": "string"}
_BLOCK: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_BLOCKS: Json = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _BLOCK}]}
_MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": _BLOCKS},
        "required": ["role", "content"],
    },
}


class MessagesRequest(RequestBody):
    """POST /v1/messages, and the count of its tokens. What it does not name goes on to the conversation, which knows
    vLLM's fields and this project's own."""

    messages: Any = Field(None, json_schema_extra=_MESSAGES)
    system: Any = None
    max_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None

    def check(self, limits: LimitsConfig) -> None:
        extras = {name: value for name, value in (self.model_extra or {}).items() if name not in _INERT}
        known = self.known | {name: extras.get(name) is not None for name in _OF_CHAT}
        for name in _OPENAI.keys() & extras:
            check_neutral(name, extras[name], _OPENAI)
        unknown = {name: value for name, value in extras.items() if name not in _OF_CHAT and name not in _OPENAI}
        check_extras(unknown, known, limits.strict)
        if self.mcp_servers:
            raise InvalidRequest("mcp_servers is given: nothing is called from here; offer their tools", "mcp_servers")
        budget, most = self._check_thinking(), self.max_tokens
        if most is not None and most < 1:
            raise InvalidRequest(f"max_tokens is {most}, must be at least 1", "max_tokens")
        if budget is not None and most is not None and budget >= most:
            raise InvalidRequest(
                f"thinking.budget_tokens is {budget}, must be less than max_tokens, which is {most}", "thinking"
            )

    @property
    def thinks(self) -> bool:
        """Whether the answer may begin with thinking, which is then part of it."""
        return self.thinking is not None and self.thinking.get("type") != "disabled"

    def conversation(self) -> Json:
        """Returns the equivalent body for /v1/chat/completions; InvalidRequest names what does not fit."""
        messages = read_conversation(self.system, self.messages)
        body = {name: value for name, value in (self.model_extra or {}).items() if name in _OF_CHAT}
        body |= {"model": self.model, "messages": messages}
        if messages[-1]["role"] == "assistant":  # the answer's beginning
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            body["tools"] = [_tool(f"tools[{place}]", tool) for place, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            body |= _tool_choice(self.tool_choice)
        if form := self.output_format or (self.output_config or {}).get("format"):
            body["response_format"] = _response_format(form)
        body |= {"reasoning_effort": self._effort(), "include_reasoning": self.thinks, "stop": self.stop_sequences}
        return body | {name: getattr(self, name) for name in _SAME}

    def _effort(self) -> str:
        if not self.thinks:
            self._check_thinking()
            return "none"
        budget = self._check_thinking()
        effort = (self.output_config or {}).get("effort")
        if effort is not None and effort not in _EFFORTS:
            shown = reprlib.repr(effort)
            raise InvalidRequest(
                f"output_config.effort is {shown}, must be one of {', '.join(_EFFORTS)}", "output_config"
            )
        by_budget = next((name for most, name in _BUDGETS if budget and budget < most), "high" if budget else "medium")
        return _EFFORTS[effort] if effort is not None else by_budget

    def _check_thinking(self) -> int | None:
        """Returns the budget; InvalidRequest for a `thinking` that is none."""
        thinking = self.thinking or {"type": "disabled"}
        kind, budget = thinking.get("type"), thinking.get("budget_tokens")
        if kind not in ("enabled", "disabled", "adaptive"):
            what = f"thinking.type is {reprlib.repr(kind)}, must be enabled, adaptive or disabled"
            raise InvalidRequest(what, "thinking")
        if kind != "enabled":
            return None
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise InvalidRequest(f"thinking.budget_tokens is {reprlib.repr(budget)}, must be at least 1", "thinking")
        return budget


def in_our_words(error: InvalidRequest) -> InvalidRequest:
    """Returns an error of the conversation with this endpoint's names of fields."""
    told = renamed(error, _NAMES, _PARTS)
    if error.field == "messages" and "leave room for a new one" in error.message:
        return InvalidRequest(f"prompt is too long: {told.message}", told.field)  # how clients know that it is
    return told


def _tool(place: str, tool: Any) -> Json:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise InvalidRequest(
            f"{place} is of type {reprlib.repr(kind)}: only tools that the caller runs are supported (type custom)",
            "tools",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        what = "missing" if schema is None else reprlib.repr(schema)
        raise InvalidRequest(f"{place}.input_schema is {what}, must be a JSON schema of an object", "tools")
    same = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": same | {"parameters": schema}}


def _tool_choice(choice: Any) -> Json:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        body: Json = {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    elif kind in _CHOICES:
        body = {"tool_choice": _CHOICES[kind]}
    else:
        ways = "{'type': 'auto'}, 'any', 'none' or {'type': 'tool', 'name': …}"
        raise InvalidRequest(f"tool_choice is {reprlib.repr(choice)}, must be {ways}", "tool_choice")
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        what = f"tool_choice.disable_parallel_tool_use is {reprlib.repr(single)}, must be true or false"
        raise InvalidRequest(what, "tool_choice")
    return body | ({"parallel_tool_calls": False} if single else {})


def _response_format(form: Any) -> Json:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidRequest(
            f"output_config.format is {reprlib.repr(form)}, must be {{'type': 'json_schema', 'schema': …}}",
            "output_config",
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
