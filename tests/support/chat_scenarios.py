"""What the golden transcripts of chat completions ask, and what the model would write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from allspan.protos.api.errors import Unavailable
from support.scripted_engine import Script

FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT_TOOLS = [{"type": "function", "function": FUNCTION | {"strict": True}}]
CALL = ("<tool_", 'call>\n{"name": "get_', 'weather", "arguments": {"ci', 'ty": "Par', 'is"}}\n</tool', "_call>")
THINKING = ("<th", "ink>\nIs it", " Paris?\n", "</think>\n\nIt is", " Paris.")
NAMED = {"type": "function", "function": {"name": "get_weather"}}

SCRIPTS: dict[str, Script] = {
    "[plain]": ("Hello", " wörld", ", bye."),
    "[stop]": ("Hello", " world", ", bye."),
    "[tools]": CALL,
    "[text and tools]": ("Let me", " see.\n\n", *CALL),
    "[two calls]": (*CALL, "\n", *CALL),
    "[malformed]": ("<tool_call>\n{'name'", ": 'get_weather'}", "</tool_call>"),
    "[tool result]": ("It rains", " in Paris."),
    "[thinking]": THINKING,
    "[thinking and tools]": (*THINKING[:3], "</think>\n\n", *CALL),
    "[full]": ("Hello",),
    "[down]": Unavailable("rank 1 (pid 7 on here) died: signal 9"),
    "[breaks off]": ("Hello", Unavailable("rank 1 (pid 7 on here) died: signal 9")),
}


@dataclass(frozen=True)
class Scenario:
    """One request; `extra` is what the Python SDK sends as extra_body."""

    name: str
    request: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    settings: str = "plain"


def _user(mark: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": mark}]


def _made() -> list[Scenario]:
    made: list[Scenario] = []

    def add(name: str, mark: str, extra: dict[str, Any] | None = None, settings: str = "plain", **request: Any) -> None:
        body = {"model": "tiny", "messages": _user(mark)} | request
        made.append(Scenario(name, body, extra or {}, settings))

    def both(
        name: str, mark: str, extra: dict[str, Any] | None = None, settings: str = "plain", **request: Any
    ) -> None:
        add(name, mark, extra, settings, **request)
        add(f"{name}-stream", mark, extra, settings, stream=True, **request)

    both("plain", "[plain]")
    both("several", "[plain]", n=2, seed=7)
    both("logprobs", "[plain]", logprobs=True, top_logprobs=2, max_completion_tokens=3)
    both("stop", "[stop]", stop=["world"])
    both("length", "[plain]", max_tokens=5)
    add("usage-stream", "[plain]", stream=True, stream_options={"include_usage": True})
    usage = {"include_usage": True, "continuous_usage_stats": True}
    add("continuous-usage-stream", "[plain]", {"stream_options": usage}, stream=True)
    both("tools-auto", "[tools]", tools=TOOLS, tool_choice="auto")
    both("tools-required", "[tools]", tools=TOOLS, tool_choice="required")
    both("tools-named", "[tools]", tools=TOOLS, tool_choice=NAMED)
    both("tools-strict", "[tools]", tools=STRICT_TOOLS)
    both("tools-not-called", "[plain]", tools=TOOLS)
    both("tools-none", "[tools]", tools=TOOLS, tool_choice="none")
    both("text-and-tools", "[text and tools]", tools=TOOLS)
    both("two-calls", "[two calls]", tools=TOOLS)
    both("no-parallel-calls", "[two calls]", tools=TOOLS, parallel_tool_calls=False)
    both("malformed-call", "[malformed]", tools=TOOLS)
    both("cut-call", "[tools]", tools=TOOLS, max_tokens=60)
    add("tool-result", "", tools=TOOLS, messages=tool_result())
    both("thinking", "[thinking]", settings="thinking")
    add("thinking-usage-stream", "[thinking]", settings="thinking", stream=True, stream_options={"include_usage": True})
    both("thinking-not-told", "[thinking]", {"include_reasoning": False}, "thinking")
    both("thinking-not-separate", "[thinking]", {"separate_reasoning": False}, "thinking")
    both("thinking-and-tools", "[thinking and tools]", settings="thinking", tools=TOOLS)
    add("bad-field", "[plain]", temperature=-1)
    add(
        "bad-message",
        "",
        messages=[
            *_user("hi"),
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]},
        ],
    )
    add("bad-tool-choice", "[plain]", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}})
    add("no-key", "[plain]", settings="keyed")
    add("unknown-model", "[plain]", model="gpt-9")
    add("full", "[full]", n=4)
    both("down", "[down]")
    both("breaks-off", "[breaks off]")
    return made


def tool_result() -> list[dict[str, Any]]:
    """A conversation whose tool has answered."""
    call = {"name": "get_weather", "arguments": json.dumps({"city": "Paris"})}
    calls = [{"id": "call_1", "type": "function", "function": call}]
    return [
        {"role": "system", "content": "Be brief."},
        *_user("How is the weather in Paris?"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain [tool result]"},
    ]


SCENARIOS = _made()
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"max_concurrent_requests": 3},
    "thinking": {"reasoning_parser": "qwen3"},
    "keyed": {"api_key": ("a-key-that-nobody-here-has-0123456789",)},
}
"""Of the gateway, by the name that a scenario has for them."""
