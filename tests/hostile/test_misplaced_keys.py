"""An API key that a client sends in the wrong place (as the model, in the path, as an id …) stands in no log line; what
a key's owner stored is nobody else's, not even the admin's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import grpc
import pytest

from allspan.client.gateway.admission.admission import caller_error
from allspan.client.gateway.auth.keys import Keys, load_keys
from allspan.client.gateway.config import SecurityConfig
from allspan.client.gateway.telemetry.recorder import Telemetry
from allspan.client.gateway.telemetry.redaction import without_keys
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.results import RequestHandle
from allspan.protos.cluster.logs import JsonFormatter, TextFormatter
from support.gateway import Gateway, eventually, gateway, stub

KEYS = {
    "user": "sk-first/0123+456789abcdefghij==",
    "long": "L" * 30 + "0123456789" * 30,
    "short": "hunter2!",
    "odd": "p%41~'\"\\{}[]<>|^`$&;:@?#=_-.",
}
ADMIN_KEY = "the-admin-key-0123456789"
FOREIGN = "sk-proj-AbCdEfGh0123456789IjKlMnOp"
"""Another service's, which nothing here knows."""

Call = tuple[str, str, dict[str, Any], dict[str, str]]
PLACES: dict[str, Callable[[str], Call]] = {
    "model": lambda key: ("POST", "/v1/completions", {"model": key, "prompt": "x"}, {}),
    "model of a chat": lambda key: ("POST", "/v1/chat/completions", {"model": key, "messages": []}, {}),
    "model of a response": lambda key: ("POST", "/v1/responses", {"model": key, "input": "x"}, {}),
    "model of a message": lambda key: ("POST", "/v1/messages", {"model": key, "max_tokens": 1, "messages": []}, {}),
    "model to tokenize": lambda key: ("POST", "/tokenize", {"model": key, "prompt": "x"}, {}),
    "model, with more": lambda key: ("POST", "/v1/completions", {"model": f"Bearer {key} x", "prompt": "x"}, {}),
    "Ollama's model": lambda key: ("POST", "/api/show", {"model": key}, {}),
    "a model's path": lambda key: ("GET", f"/v1/models/{quote(key, safe='')}", {}, {}),
    "path": lambda key: ("GET", f"/{quote(key, safe='')}", {}, {}),
    "path within": lambda key: ("POST", f"/v1/{quote(key, safe='')}/completions", {"prompt": "x"}, {}),
    "query": lambda key: ("GET", f"/v1/models?api_key={quote(key, safe='')}", {}, {}),
    "X-Request-Id": lambda key: ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"X-Request-Id": key}),
    "X-Request-Id, refused": lambda key: ("POST", "/v1/completions", {"prompt": 1}, {"X-Request-Id": key}),
    "traceparent": lambda key: ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"traceparent": key}),
    "a field's name": lambda key: ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, key: 1}, {}),
    "temperature": lambda key: ("POST", "/v1/completions", {"prompt": "x", "temperature": key}, {}),
    "user": lambda key: ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "user": key}, {}),
    "a role": lambda key: ("POST", "/v1/chat/completions", {"messages": [{"role": key, "content": "x"}]}, {}),
    "a tool's name": lambda key: (
        *("POST", "/v1/chat/completions"),
        {"messages": [], "tools": [{"type": "function", "function": {"name": key}}]},
        {},
    ),
    "tool_choice": lambda key: ("POST", "/v1/chat/completions", {"messages": [], "tool_choice": key}, {}),
    "a regular expression": lambda key: ("POST", "/v1/completions", {"prompt": "x", "guided_regex": f"({key}"}, {}),
    "previous_response_id": lambda key: ("POST", "/v1/responses", {"input": "x", "previous_response_id": key}, {}),
    "a response's id": lambda key: ("GET", f"/v1/responses/{quote(key, safe='')}", {}, {}),
    "Content-Type": lambda key: ("POST", "/v1/completions", {}, {"Content-Type": key}),
    "Host": lambda key: ("GET", "/v1/models", {}, {"Host": key}),
    "Basic": lambda key: ("GET", "/v1/models", {}, {"Authorization": f"Basic {key}"}),
    "a request to abort": lambda key: ("POST", "/abort", {"request_id": key}, {}),
}


async def send(server: Gateway, call: Call, key: str) -> None:
    method, path, body, headers = call
    body_given = {"json": body} if body else {}
    await server.http.request(method, path, headers={"x-api-key": key} | headers, **body_given)


@pytest.mark.parametrize(
    "kind",
    ["user", "foreign", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("long", "short", "odd", "admin"))],
)
async def test_a_key_in_the_wrong_place_is_in_no_log_line(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    assert len(PLACES) >= 20
    caplog.set_level(logging.DEBUG)
    key = {**KEYS, "admin": ADMIN_KEY, "foreign": FOREIGN}[kind]
    async with (
        gateway(api_key=tuple(KEYS.values()), admin_api_key=ADMIN_KEY) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        for place, make in PLACES.items():
            callers = (KEYS["user"], "wrong") if "model" in place or "path" in place else (ADMIN_KEY,)
            for caller in callers:
                caplog.clear()
                await send(server, make(key), caller)
                assert key[:16] not in told(caplog), (place, told(caplog))
        caplog.clear()
        for caller in (KEYS["user"], "wrong"):
            metadata = (("x-api-key", caller), ("traceparent", key))
            for request in (pb.GenerateRequest(request_id=key, text="x"), pb.GenerateRequest(model=key, text="x")):
                call = stub(channel).Generate(request, metadata=metadata, timeout=5)
                await call.code()
            await channel.unary_unary(f"/allspan.v1.Inference/{quote(key, safe='')}")(b"", metadata=metadata).code()
        assert key[:16] not in told(caplog)
        assert caplog.records


def told(caplog: pytest.LogCaptureFixture) -> str:
    """All that the program's own log lines have, with the fields of JSON lines."""
    ours = [record for record in caplog.records if record.name.startswith(("allspan", "uvicorn"))]
    return "\n".join(f"{record.getMessage()} {getattr(record, 'fields', '')} {record.exc_text}" for record in ours)


@pytest.mark.parametrize("cut", [16, 17, 100, 329])
def test_the_beginning_of_a_long_key_is_hidden_where_text_was_cut(cut: int) -> None:
    keys = Keys({KEYS["long"]: ""})
    assert keys.hide(f"model {KEYS['long'][:cut]!r} is not served here") == "model '*** is not served here"


@pytest.mark.parametrize("written", [str, repr, json.dumps, lambda key: repr({"model": repr([key])})])
@pytest.mark.parametrize("kind", KEYS)
def test_a_key_is_hidden_however_often_it_was_escaped(kind: str, written: Callable[[str], str]) -> None:
    hidden = Keys(dict.fromkeys(KEYS.values(), "")).hide(f"got {written(KEYS[kind])} here")
    assert KEYS[kind][:6] not in hidden
    assert KEYS[kind][-6:] not in hidden
    assert hidden.startswith("got ")
    assert hidden.endswith("*** here")


def test_of_two_keys_in_one_word_both_are_hidden() -> None:
    for keys in (["first-key", "second-longer-key"], ["second-longer-key", "first-key"]):
        assert Keys(dict.fromkeys(keys, "")).hide(f"<{keys[0]},{keys[1]}>") == "<***"


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_a_traceback_shows_no_key(formatter: Callable[[str], logging.Formatter]) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(formatter("gateway").format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("allspan.gateway")
    logger.addHandler(handler)
    try:
        with without_keys(Keys({KEYS["odd"]: ""}).hide):
            caller_error(ValueError({"model": KEYS["odd"]}), "POST /v1/x")
    finally:
        logger.removeHandler(handler)
    (line,) = lines
    assert "ValueError" in line
    assert "%41" not in line


def test_a_failed_request_tells_its_trace_no_key() -> None:
    traces = Mock()
    telemetry = Telemetry("tiny", traces, Keys({KEYS["odd"]: ""}).hide)
    origin = Origin(f"POST /v1/{KEYS['odd']}")
    telemetry.record(origin, RequestHandle(KEYS["odd"], "tiny"), 1).end(
        "internal", 0, None, f"no model {KEYS['odd']!r}"
    )
    assert "%41" not in repr(traces.mock_calls) + origin.label


@pytest.mark.parametrize(("key", "warns"), [("abc", True), ("\\\\\\\\a", True), ("abcd", False)])
def test_a_key_that_is_too_short_to_be_hidden_is_warned_about(
    key: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    load_keys(SecurityConfig(api_key=(key,)))
    assert ("fewer than 4 characters" in caplog.text) == warns


@pytest.mark.parametrize("text", ["", "model 'SmolLM2-135M-Instruct' is not served", "POST /v1/sk", "a" * 5000])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert Keys(dict.fromkeys(KEYS.values(), ""), ADMIN_KEY).hide(text) == text


async def test_a_stored_response_is_its_owner_s_alone() -> None:
    async with gateway(api_key=(KEYS["user"], KEYS["short"]), admin_api_key=ADMIN_KEY) as server:

        async def status(method: str, path: str, key: str, **body: Any) -> int:
            given = {"json": body} if body else {}
            return (await server.http.request(method, path, headers={"x-api-key": key}, **given)).status_code

        made = await server.http.post("/v1/responses", json={"input": "x"}, headers={"x-api-key": KEYS["user"]})
        name = made.json()["id"]
        for key in (KEYS["short"], ADMIN_KEY, "wrong", ""):
            refused = 404 if key in (KEYS["short"], ADMIN_KEY) else 401
            for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
                assert await status(method, f"/v1/responses/{name}{path}", key) == refused, (method, path, key)
            continued = await status("POST", "/v1/responses", key, input="y", previous_response_id=name)
            assert continued == (400 if refused == 404 else 401)
        assert await status("GET", f"/v1/responses/{name}", KEYS["user"]) == 200
        assert await status("DELETE", f"/v1/responses/{name}", KEYS["user"]) == 200
        assert await status("GET", f"/v1/responses/{name}", KEYS["user"]) == 404
        await eventually(lambda: not server.engine.running)
