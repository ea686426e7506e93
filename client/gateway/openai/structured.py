"""Structured output as requests ask for it: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`,
gRPC's `structured`; all of them become one `Grammar`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import MAX_GRAMMAR_CHARS, Grammar

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""The fields that request structured output; a request may have at most one."""
OPENAI_TYPES = ("text", "json_object", "json_schema")
KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""vLLM's names (of `structured_outputs`, and after "guided_") → a Grammar's."""
_INERT = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")


def grammar_of(fields: Mapping[str, Any]) -> tuple[Grammar, str] | None:
    """Returns the grammar that FIELDS request, and the name of the field; None for free text. InvalidRequest names what
    does not fit."""
    asked: dict[str, Grammar] = {}
    for name in FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        if name == "response_format":
            grammar = _from_response_format(value)
        elif name == "structured_outputs":
            grammar = _from_structured_outputs(value)
        else:
            grammar = _grammar(KINDS[name.removeprefix("guided_")], value, name)
        if grammar is not None:
            asked[name] = grammar
    if len(asked) > 1:
        names = " and ".join(asked)
        raise InvalidRequest(f"{names} are given, at most one of them can be followed", list(asked)[-1])
    return next(((grammar, name) for name, grammar in asked.items()), None)


def from_message(options: pb.SamplingOptions) -> Grammar | None:
    """Returns the grammar of gRPC's `sampling.structured`."""
    if not options.HasField("structured"):
        return None
    asked = options.structured
    place = "sampling.structured"
    match asked.WhichOneof("kind"):
        case "json_object":
            return _grammar("json_object", asked.json_object, f"{place}.json_object")
        case "json_schema":
            return _grammar("json_schema", asked.json_schema, f"{place}.json_schema")
        case "regex":
            return _grammar("regex", asked.regex, f"{place}.regex")
        case "choice":
            return _grammar("choice", list(asked.choice.texts), f"{place}.choice")
        case "grammar":
            return _grammar("grammar", asked.grammar, f"{place}.grammar")
        case _:
            raise _refusal(place, "is empty, must set one of json_object, json_schema, regex, choice, grammar")


def _from_response_format(value: Any) -> Grammar | None:
    """OpenAI's {"type": "text" | "json_object" | "json_schema", …}; `strict` or not, a schema is enforced."""
    place = "response_format"
    kind = _object(value, place).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        given = value.get("schema")  # as llama.cpp takes it
        return Grammar(kind) if given is None else _grammar("json_schema", given, f"{place}.schema")
    if kind != "json_schema":
        raise _refusal(f"{place}.type", f"is {_short(kind)}, must be one of {', '.join(OPENAI_TYPES)}")
    place = f"{place}.json_schema"
    inner = _object(value.get(kind), place)
    for name, of in (("name", str), ("description", str), ("strict", bool)):
        given = inner.get(name)
        if given is not None and not isinstance(given, of):
            raise _refusal(f"{place}.{name}", f"is {_short(given)}, must be a {'string' if of is str else 'boolean'}")
    return _grammar("json_schema", inner.get("schema"), f"{place}.schema")


def _from_structured_outputs(value: Any) -> Grammar | None:
    place = "structured_outputs"
    given = {name: item for name, item in _object(value, place).items() if item is not None}
    for name in _INERT:
        if given.pop(name, False):
            raise _refusal(f"{place}.{name}", "is not supported: leave it out")
    if unknown := [name for name in given if name not in KINDS]:
        raise _refusal(f"{place}.{unknown[0][:64]}", f"is not supported, only {', '.join(KINDS)}")
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        which = f"has {' and '.join(given)}" if given else "is empty"
        raise _refusal(place, f"{which}, must have exactly one of {', '.join(KINDS)}")
    ((name, item),) = given.items()
    return _grammar(KINDS[name], item, f"{place}.{name}")


def _grammar(kind: str, value: Any, place: str) -> Grammar | None:
    if kind == "json_object":
        if not isinstance(value, bool):
            raise _refusal(place, f"is {_short(value)}, must be true")
        return Grammar(kind) if value else None
    if kind == "json_schema":
        if not isinstance(value, (str, dict, bool)):
            raise _refusal(place, f"is {_short(value)}, must be a JSON schema")
        text = value if isinstance(value, str) else _dumped(value, place)
    elif kind == "choice":
        if not isinstance(value, list) or not value:
            raise _refusal(place, f"is {_short(value)}, must be a list of at least one string")
        text = _dumped(value, place)
    else:
        if not isinstance(value, str) or not value:
            raise _refusal(place, f"is {_short(value)}, must be a string that is not empty")
        text = value
    try:
        return Grammar(kind, text)
    except InvalidRequest as error:
        raise _refusal(place, error.message.removeprefix("grammar's text").lstrip()) from None


def _dumped(value: Any, place: str) -> str:
    if _is_longer(value, MAX_GRAMMAR_CHARS):
        raise _refusal(place, f"has more than {MAX_GRAMMAR_CHARS} characters, the limit")
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nested too deeply
        raise _refusal(place, f"is no JSON that can be written: {error}") from None


def _is_longer(value: Any, limit: int) -> bool:
    """Returns whether a value has more than about `limit` characters as JSON; it takes no longer than `limit`
    characters take."""
    waiting, size = [value], 0
    while waiting and size <= limit:
        item = waiting.pop()
        size += 2
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, (list, dict)):
            if (size := size + len(item)) > limit:
                return True
            waiting += item
            if isinstance(item, dict):
                waiting += item.values()
    return size > limit


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(place, f"is {_short(value)}, must be an object")
    return value


def _refusal(place: str, problem: str) -> InvalidRequest:
    gap = "" if problem.startswith("[") else " "  # an entry's place
    return InvalidRequest(f"{place}{gap}{problem}", place if place.startswith("sampling.") else place.partition(".")[0])


def _short(value: Any) -> str:
    return "missing" if value is None else reprlib.repr(value)
