"""GET /openapi.json: the bodies that the endpoints read, with their ranges on this server, and every answer's shape.

The handlers read bodies themselves (limits of size and time come first), so this is put together from the models that
they are parsed with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.http.error_shapes import OPENAI, shape_of
from allspan.client.gateway.openai.extra_fields import HARMLESS
from allspan.client.gateway.openapi.fields import described_fields, with_ranges

Json = dict[str, Any]

_REFUSALS = {
    "400": "a field or the body does not fit; the message names field, value and limit",
    "401": "the server wants an API key",
    "403": "the key is not for this endpoint",
    "404": "no such model, response or endpoint",
    "405": "this endpoint does not take the method",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "the server is full; Retry-After says when to come back",
    "499": "the request was cancelled",
    "500": "a bug; the message has the id under which the log says more",
    "503": "the ranks are down or stuck, or the server drains",
    "504": "the request's time ran out",
}


def describe(app: FastAPI, context: GatewayContext, endpoints: Sequence[Endpoint]) -> None:
    """Makes the application serve its description at /openapi.json."""
    made: dict[tuple[str, ...], Json] = {}

    def openapi() -> Json:
        names = context.model.all_names
        if names not in made:  # adapters come and go
            made.clear()
            made[names] = _document(app, context, {endpoint.key: endpoint for endpoint in endpoints})
        return made[names]

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, context: GatewayContext, endpoints: Mapping[tuple[str, str], Endpoint]) -> Json:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: Json = {"Error": OPENAI.schema}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            endpoint = endpoints[path, method]
            if endpoint.body is not None:
                operation["requestBody"] = _body(endpoint.body, endpoint.required, context, schemas)
            operation["responses"] = _answers(endpoint, operation["responses"])
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    return document


def _body(model: type[BaseModel], required: Sequence[str], context: GatewayContext, schemas: Json) -> Json:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    fields = described_fields(model, context.model, context.config.limits)
    for name, described in fields.items():
        schema["properties"][name] = with_ranges(schema["properties"][name], described)
    if model.model_config.get("extra") == "allow":
        schema["properties"] = {name: {} for name in HARMLESS} | schema["properties"]
    schema["additionalProperties"] = not context.config.limits.strict
    if required:
        schema["required"] = list(required)
    schemas[model.__name__] = schema
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"required": True, "content": content}


def _answers(endpoint: Endpoint, plain: Json) -> Json:
    """The one that is hoped for, and every refusal in the shape of the endpoint's API."""
    answers = {status: answer for status, answer in plain.items() if status != "422"}
    content: Json = {"application/json": {"schema": endpoint.answer}} if endpoint.answer else {}
    content |= {kind: {"schema": {}} for kind in endpoint.media_types}
    if content:
        answers["200"] = {"description": "the answer, or a stream of it", "content": content}
    shape = shape_of(endpoint.path)
    schema = {"$ref": "#/components/schemas/Error"} if shape is OPENAI else shape.schema
    refused = {"application/json": {"schema": schema}}
    for status, why in _REFUSALS.items():
        answers[status] = {"description": why, "content": refused}
    return answers
