"""Fields that an endpoint does not have: ignored and logged once, refused when probably misspelt or meant to matter."""

from __future__ import annotations

import logging

import pytest

from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.extra_fields import check_extras
from allspan.protos.api.errors import InvalidRequest
from support.gateway import gateway

KNOWN = dict.fromkeys(ChatRequest.model_fields, False) | {"model": True, "messages": True}
HI = [{"role": "user", "content": "hi"}]
HABITS = (
    *("prediction", "cache_prompt", "options", "store", "metadata", "service_tier", "user", "safety_identifier"),
    *("prompt_cache_key", "keep_alive", "think", "top_a", "mirostat", "mirostat_tau", "tfs_z", "repeat_penalty"),
    *("id_slot", "n_probs", "num_ctx", "samplers", "format", "template", "guided_decoding_backend", "session_id"),
    *("enable_thinking", "reasoning", "provider", "transforms", "models", "plugins", "x", "N", "extra_body", "timeout"),
)


@pytest.mark.parametrize("name", HABITS)
def test_what_clients_send_by_habit_is_ignored(name: str) -> None:
    check_extras({name: {"a": 1}}, KNOWN, strict=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("Max-Tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("topP", "top_p"),
        ("stops", "stop"),
        ("tool", "tools"),
        ("responseFormat", "response_format"),
        ("repetition_penality", "repetition_penalty"),
        ("max_new_tokens", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("stop_sequences", "stop"),
    ],
)
def test_a_field_misspelt_is_refused_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean {meant}\\?") as caught:
        check_extras({name: 5}, KNOWN, strict=False)
    assert caught.value.field == name
    check_extras({name: 5}, KNOWN | {meant: True}, strict=False)  # who sends both means the right one


def test_too_many_fields_are_refused_before_any_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr("difflib.get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    check_extras({f"colour{place}": 1 for place in range(64)}, KNOWN, strict=False)
    assert len(compared) == 64
    with pytest.raises(InvalidRequest, match="does not know 65 of the fields, must be at most 64"):
        check_extras({f"colour{place}": 1 for place in range(65)}, KNOWN, strict=False)
    assert len(compared) == 64


async def test_an_ignored_field_is_logged_once_and_refused_by_a_strict_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "allspan.gateway")
    async with gateway() as server:
        for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})):
            assert (await server.post(path, **body, colour="red")).status_code == 200
        assert (await server.post("/v1/responses", input="x", colour="red")).status_code == 200
        assert (await server.post("/tokenize", prompt="x", colour="red")).status_code == 200
    assert [record.getMessage().count("'colour'") for record in caplog.records] == [1]
    async with gateway(strict=True) as server:
        response = await server.post("/v1/chat/completions", messages=HI, colour="red", user="me")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "colour")
        assert (await server.post("/v1/responses", input="x", colour="red")).status_code == 400
        assert (await server.post("/v1/chat/completions", messages=HI, user="me", prediction={})).status_code == 200
