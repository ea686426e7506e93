"""The formats of tool calls: a row a format, for the parser, the prompt and the grammar alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allspan.protos.text.written import Written, written


@dataclass(frozen=True)
class Region:
    """Calls between two marks: JSON objects with a name and arguments, or a list of them."""

    open: str
    """The text that begins a call; if empty, an output that begins with JSON is a call."""
    close: str = ""
    known_names_only: bool = False
    """Treats an object that names no tool of the request as the answer rather than as a call."""


@dataclass(frozen=True)
class CallFormat:
    """`regions[0]` is how calls are written into prompts, and how a grammar has them written."""

    name: str
    regions: tuple[Region, ...]
    arguments: str = "arguments"
    """The member that holds the arguments, where we write a call; read are all names in use."""
    separator: str = "\n"
    """The text between two calls of one output."""
    marks: tuple[str, ...] = ()
    """The marks of messages with channels, in whose headers the names of functions stand; else none."""

    def written(self, name: str, arguments: Any) -> Written:
        """Returns one call as this format's model would write it; its marks are ours, the rest is the caller's.
        `arguments` is an object, or text that is none."""
        if self.marks:
            header = f"{self.regions[0].open}{name} <|constrain|>json<|message|>"
            return written(header) + json.dumps(arguments, ensure_ascii=False) + written(self.regions[0].close)
        return self._marked(json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False))

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> Written:
        """The system prompt that teaches a model which was not trained on tools; the tools in it are the caller's."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        call = self._marked(f'{{"name": <function-name>, "{self.arguments}": <arguments-json-object>}}')
        before = (
            "You may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> tags:\n<tools>\n"
        )
        after = (
            "\n</tools>\n\nFor each function call, return a JSON object with the function's name and its arguments, "
            "like this and without anything else around it:\n"
        )
        return written(before) + listed + written(after) + call

    def _marked(self, call: str) -> Written:
        region = self.regions[0]
        if not region.close:
            return written(region.open) + call
        return written(f"{region.open}\n") + call + written(f"\n{region.close}")


HARMONY = "harmony"
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""The marks of OpenAI's "harmony" format, which gpt-oss writes."""

_BARE = Region("", known_names_only=True)
_HERMES = Region("<tool_call>", "</tool_call>")

HERMES = CallFormat("hermes", (_HERMES,))
LLAMA3_JSON = CallFormat("llama3_json", (_BARE, Region("<|python_tag|>")), arguments="parameters", separator="; ")
MISTRAL = CallFormat("mistral", (Region("[TOOL_CALLS]"),))
GRANITE = CallFormat("granite", (Region("<|tool_call|>"), Region("<tool_call>")))
CHANNELS = CallFormat(HARMONY, (Region("<|channel|>commentary to=functions.", "<|call|>"),), marks=MARKS)
GENERIC = CallFormat(
    "generic",
    (
        _HERMES,
        Region("<function_call>", "</function_call>"),
        Region("<|python_tag|>"),
        Region("[TOOL_CALLS]"),
        Region("```json", "```", known_names_only=True),
        _BARE,
    ),
)

FORMATS: Mapping[str, CallFormat] = {
    row.name: row for row in (HERMES, LLAMA3_JSON, MISTRAL, GRANITE, CHANNELS, GENERIC)
}
"""The formats by the name that `--tool-call-parser` takes."""


def has_channels(source: str) -> bool:
    """Whether a chat template is of a model whose messages have channels."""
    return "<|channel|>" in source and "<|message|>" in source


def format_of_template(source: str, renders_tools: bool) -> CallFormat:
    """Returns the format that a chat template's own text shows; for a template without tools, the one that the system
    prompt teaches."""
    if has_channels(source):
        return CHANNELS
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<|tool_call|>" in source:
        return GRANITE
    if "<tool_call>" in source or not renders_tools:
        return HERMES
    if "<|python_tag|>" in source or '"parameters"' in source:
        return LLAMA3_JSON
    return GENERIC
