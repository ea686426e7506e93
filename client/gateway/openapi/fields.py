"""Ranges and shapes of fields, which their types do not say: `SamplingParams` and the limits check them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.served_model import ServedModel
from allspan.protos.api.grammar import MAX_CHOICES
from allspan.protos.api.options import MAX_CACHE_SALT_CHARS, MAX_TIMEOUT_S
from allspan.protos.api.sampling import MAX_STOP_TOKENS, SAMPLING_FIELDS
from allspan.protos.api.sampling_fields import MAX_LOGIT_BIASES, MAX_STOP_STRING_CHARS

Json = dict[str, Any]


def with_ranges(schema: Json, described: Json) -> Json:
    """Returns a field's schema with the described ranges added, where both have the same type; null stays allowed."""
    arms = schema.get("anyOf", [schema])
    types = {arm.get("type") for arm in arms}
    if None not in types and described.get("type") not in (None, *types):
        return schema
    return {"anyOf": [described, {"type": "null"}]} if "null" in types else described


def described_fields(model: type[BaseModel], served: ServedModel, limits: LimitsConfig) -> dict[str, Json]:
    """Returns the additions to the schema of each field that the model has and does not describe itself."""
    room = served.max_model_len - 1
    token = {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}
    ids: Json = {"type": "array", "items": token, "minItems": 1, "maxItems": room}
    text: Json = {"type": "string", "minLength": 1}
    stop: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
    logprobs: Json = {"type": "integer", "minimum": 0, "maximum": limits.max_logprobs}
    tokens: Json = {"type": "integer", "minimum": 1, "maximum": room}
    fields: dict[str, Json] = {name: rule.schema for name, (_, rule) in SAMPLING_FIELDS.items() if rule.schema}
    fields |= {
        "model": {"enum": list(served.all_names)},
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "max_output_tokens": tokens,
        "n": {"type": "integer", "minimum": 1, "maximum": limits.max_n},
        "best_of": {"type": "integer", "minimum": 1, "maximum": limits.max_best_of},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "seed": {"type": "integer", "minimum": -(2**64), "maximum": 2**64 - 1},
        "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
        "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
        "cache_salt": {"type": "string", "maxLength": MAX_CACHE_SALT_CHARS},
        "truncate_prompt_tokens": {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": room}]},
        "stop_token_ids": {"type": "array", "items": token, "maxItems": MAX_STOP_TOKENS},
        "allowed_token_ids": {"type": "array", "items": token},
        "tokens": {"type": "array", "items": token},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": limits.max_stop_sequences}]},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIASES,
        },
    }
    many: Json = {"type": "array", "minItems": 1, "maxItems": limits.max_prompts}
    if "messages" not in model.model_fields:
        fields["prompt"] = {"anyOf": [text, many | {"items": text}, ids, many | {"items": ids}]}
    fields["messages"] = {"type": "array", "minItems": 1, "items": _MESSAGE}
    fields["input"] = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _ITEM}]}
    fields |= _structured(limits)
    own = {name for name, info in model.model_fields.items() if info.json_schema_extra}
    return {name: described for name, described in fields.items() if name in model.model_fields.keys() - own}


def _structured(limits: LimitsConfig) -> dict[str, Json]:
    """Returns the schemas of the fields that request structured output; whether a schema or an expression is supported
    is known once it is compiled."""
    text: Json = {"type": "string", "minLength": 1, "maxLength": limits.max_grammar_bytes}
    schema: Json = {"anyOf": [{"type": "object"}, {"type": "boolean"}, text]}
    choice: Json = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CHOICES,
        "items": {"type": "string", "minLength": 1},
    }
    kinds: Json = {"json": schema, "json_object": {"const": True}, "regex": text, "choice": choice, "grammar": text}
    named: Json = {
        "type": "object",
        "properties": {
            "name": {"type": ["string", "null"]},
            "description": {"type": ["string", "null"]},
            "schema": schema,
            "strict": {"type": ["boolean", "null"]},
        },
        "required": ["schema"],
    }
    forms: list[Json] = [
        {"type": "object", "properties": {"type": {"const": kind}}, "required": ["type"]}
        for kind in ("text", "json_object")
    ]
    forms.append(
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": named},
            "required": ["type", "json_schema"],
        }
    )
    return {
        "response_format": {"anyOf": [*forms, {"type": "null"}]},
        "structured_outputs": {
            "anyOf": [
                *(_only(name, kind) for name, kind in kinds.items()),
                {"type": "null"},
            ]
        },
        **{
            f"guided_{name}": {"anyOf": [kinds[name], {"type": "null"}]}
            for name in ("json", "regex", "choice", "grammar")
        },
    }


def _only(name: str, kind: Json) -> Json:
    return {"type": "object", "properties": {name: kind}, "required": [name]}


_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}]},
        "name": {"type": ["string", "null"]},
        "tool_call_id": {},
    },
    "required": ["role", "content"],
}
_ITEM: Json = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {"type": "string"},
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "function_call"},
                "call_id": {"type": "string"},
                "name": {"type": "string"},
                "arguments": {"type": "string"},
            },
            "required": ["type", "call_id", "name", "arguments"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": {"type": "string"},
                "output": {"type": "string"},
            },
            "required": ["type", "call_id", "output"],
        },
    ]
}
