"""The tools of a request and what the model may do with them."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, replace
from typing import Any

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text.schema_keywords import check_keywords, simplified

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 65536
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# How models learn to write JSON, and nothing that could go on for ever.
_AS_TRAINED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Function:
    """One function that the model may call."""

    name: str
    tool: dict[str, Any]
    """The tool as the request has it, for the template."""
    strict: bool = False
    """Whether its arguments must follow its schema exactly."""

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments, for a grammar. Without parameters there are none. Of a strict function every
        keyword holds (InvalidRequest names one that cannot), of others what can."""
        schema = self.tool["function"].get("parameters")
        if schema is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        try:
            if self.strict:
                check_keywords(schema)
            schema = simplified(schema)
        except InvalidRequest as error:
            raise InvalidRequest(f"the parameters of tool {self.name!r}: {error.message}", "tools") from error
        except RecursionError:
            raise InvalidRequest(f"the parameters of tool {self.name!r} are nested too deeply", "tools") from None
        return {
            **schema,
            "type": schema.get("type", "object"),
            "x-guidance": {**_AS_TRAINED, "lenient": not self.strict},
        }


@dataclass(frozen=True)
class ToolUse:
    """The functions that the model may call, and whether it must call one."""

    functions: tuple[Function, ...] = ()
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions)

    @property
    def for_template(self) -> tuple[dict[str, Any], ...]:
        return tuple(function.tool for function in self.functions)


NO_TOOLS = ToolUse()


def read_tools(tools: Any, tool_choice: Any, parallel: bool | None) -> ToolUse:
    """Reads OpenAI's three fields. InvalidRequest names the place of what does not fit."""
    functions = _functions(tools)
    use = ToolUse(functions, parallel=parallel is not False)
    if tool_choice is None or tool_choice == "auto":
        return use
    if tool_choice == "none":
        return NO_TOOLS
    if not functions:
        raise InvalidRequest(f"tool_choice is {reprlib.repr(tool_choice)}, which needs tools", "tool_choice")
    if tool_choice == "required":
        return replace(use, required=True)
    if not isinstance(tool_choice, dict):
        raise _bad_choice(tool_choice)
    if tool_choice.get("type") == "allowed_tools":
        return _allowed(use, tool_choice)
    return replace(use, functions=(_named(use, tool_choice),), required=True, parallel=False)


def _functions(tools: Any) -> tuple[Function, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools is {reprlib.repr(tools)}, must be a list of functions", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS}", "tools")
    functions = tuple(_function(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest(f"tools[{i}].function.name is {name!r}, which is an earlier tool's name", "tools")
    return functions


def _function(place: str, tool: Any) -> Function:
    kind = tool.get("type") if isinstance(tool, dict) else None
    function = tool.get("function") if isinstance(tool, dict) else None
    if kind != "function" or not isinstance(function, dict):
        shown = reprlib.repr(tool)
        raise InvalidRequest(f"{place} is {shown}, must be {{'type': 'function', 'function': …}}", "tools")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = reprlib.repr(name)
        problem = "must be of 1 to 64 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(f"{place}.function.name is {shown}, {problem}", "tools")
    if description is not None and not isinstance(description, str):
        shown = reprlib.repr(description)
        raise InvalidRequest(f"{place}.function.description is {shown}, must be a string", "tools")
    parameters, strict = function.get("parameters"), function.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        shown = reprlib.repr(parameters)
        raise InvalidRequest(f"{place}.function.parameters is {shown}, must be a JSON schema of an object", "tools")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{place}.function.strict is {reprlib.repr(strict)}, must be true or false", "tools")
    return Function(name, tool, bool(strict))


def _named(use: ToolUse, choice: Any, place: str = "tool_choice") -> Function:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise _bad_choice(choice, place)
    for known in use.functions:
        if known.name == name:
            return known
    raise InvalidRequest(f"{place} names {reprlib.repr(name)}, which is not among tools", "tool_choice")


def _allowed(use: ToolUse, choice: dict[str, Any]) -> ToolUse:
    allowed = choice.get("allowed_tools")
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(tools, list) or not tools:
        raise _bad_choice(choice)
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        shown = reprlib.repr(mode)
        raise InvalidRequest(f"tool_choice.allowed_tools.mode is {shown}, must be auto or required", "tool_choice")
    kept = [_named(use, tool, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(tools)]
    return replace(use, functions=tuple({known.name: known for known in kept}.values()), required=mode == "required")


def _bad_choice(choice: Any, place: str = "tool_choice") -> InvalidRequest:
    ways = "none, auto, required, {'type': 'function', 'function': {'name': …}} or {'type': 'allowed_tools', …}"
    return InvalidRequest(f"{place} is {reprlib.repr(choice)}, must be {ways}", "tool_choice")
