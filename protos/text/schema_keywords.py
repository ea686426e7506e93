"""The JSON Schema keywords that are enforced, and a schema's first one that is not, by its path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from allspan.protos.api.errors import InvalidRequest

ENFORCED = (
    "$anchor",
    "$defs",
    "$id",
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "definitions",
    "dependentRequired",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maximum",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minimum",
    "minItems",
    "minLength",
    "minProperties",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
)
"""An output keeps to these."""

REFUSED = (
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "x-guidance",
)
"""These would change what is valid, and no grammar enforces them: InvalidRequest, unless their value asks for nothing.
Whatever is in neither table (titles, descriptions, keywords of others) says nothing about an output."""

FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
)
"""Values of `format` that are enforced."""

REFUSED_FORMATS = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
)
"""JSON Schema's other formats. Whatever is in neither table ("password", "int64") says nothing about an output."""

_IDLE: Mapping[str, tuple[Any, ...]] = {
    "contains": (),
    "dependencies": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Values with which a refused keyword has no effect."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_ONE = ("additionalItems", "additionalProperties", "items")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_keywords(schema: Any) -> None:
    """Checks a schema; InvalidRequest (field "grammar") names the first keyword that is not enforced, and its path ($
    is the root)."""
    home = schema.get("$id") if isinstance(schema, dict) else None
    home = home if isinstance(home, str) and home else "#"
    waiting: list[tuple[str, Any]] = [("$", schema)]
    seen: set[int] = set()
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        _check(path, part, home)
        waiting += reversed(list(_parts(path, part, schema)))


def simplified(schema: Any) -> Any:
    """Returns a copy in the compiler's keywords: without keywords that have no effect, and with `dependentRequired` in
    terms of others.

    For a schema that `check_keywords` took.
    """
    if not isinstance(schema, dict):
        return schema
    copy = {key: _simplified(key, value) for key, value in schema.items() if not _says_nothing(key, value)}
    needs = copy.get("dependentRequired")
    if isinstance(needs, dict) and all(_is_names(names) for names in needs.values()):
        del copy["dependentRequired"]
        either = [
            {"anyOf": [{"properties": {name: False}}, {"required": [name, *others]}]} for name, others in needs.items()
        ]
        if either:
            copy["allOf"] = [*copy.get("allOf", ()), *either]
    return copy


def _check(path: str, part: Mapping[str, Any], home: str) -> None:
    for key, value in part.items():
        if key in REFUSED and not _is_idle(key, value):
            raise InvalidRequest(f"{path}.{key}: the keyword {key!r} is not supported", "grammar")
    named = part.get("format")
    if named in REFUSED_FORMATS:
        known = ", ".join(FORMATS)
        raise InvalidRequest(f"{path}.format: the format {named!r} is not supported, only {known}", "grammar")
    reference = part.get("$ref")
    if isinstance(reference, str) and not reference.startswith(("#", home)):
        raise InvalidRequest(
            f"{path}.$ref: {reference[:128]!r} is in another document, must be within the schema (#/$defs/…)", "grammar"
        )


def _parts(path: str, part: Mapping[str, Any], root: Any) -> Iterator[tuple[str, Any]]:
    """The schemas inside one that say what is valid, with their paths."""
    for key in _ONE:
        value = part.get(key)
        if isinstance(value, list):
            yield from ((f"{path}.{key}[{i}]", item) for i, item in enumerate(value))
        elif value is not None:
            yield f"{path}.{key}", value
    for key in _LISTS:
        if isinstance(values := part.get(key), list):
            yield from ((f"{path}.{key}[{i}]", value) for i, value in enumerate(values))
    for key in _MAPS:
        if isinstance(named := part.get(key), dict):
            yield from ((f"{path}.{key}{_step(name)}", value) for name, value in named.items())
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        yield from _target(reference, root)


def _target(reference: str, root: Any) -> Iterator[tuple[str, Any]]:
    """Returns the target of a JSON pointer; nothing where there is none (the compiler reports it)."""
    found, path = root, "$"
    for step in reference[2:].split("/"):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found, path = found[name], path + _step(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found, path = found[int(name)], f"{path}[{name}]"
        else:
            return
    yield path, found


def _step(name: str) -> str:
    return f".{name}" if _NAME.fullmatch(name) or name == "$defs" else f"[{name[:64]!r}]"


def _simplified(key: str, value: Any) -> Any:
    if key in (*_MAPS, "$defs", "definitions") and isinstance(value, dict):
        return {name: simplified(part) for name, part in value.items()}
    if key in (*_LISTS, *_ONE) and isinstance(value, list):
        return [simplified(part) for part in value]
    return simplified(value) if key in _ONE else value


def _says_nothing(key: str, value: Any) -> bool:
    return _is_idle(key, value) or (key == "format" and isinstance(value, str) and value not in FORMATS)


def _is_idle(key: str, value: Any) -> bool:
    return any(value == idle and isinstance(value, bool) is isinstance(idle, bool) for idle in _IDLE.get(key, ()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
