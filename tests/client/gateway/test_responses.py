"""OpenAI's Responses through its own SDK: texts, typed events, conversations that go on, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from allspan.client.gateway.http.errors import HttpError
from allspan.client.gateway.responses.store import ResponseStore, StoredResponse
from support.chat_tokenizer import chat_tokenizer
from support.fake_engine import ANSWER, FakeEngine
from support.gateway import Gateway, eventually, fake_engine, gateway


@asynccontextmanager
async def served(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[tuple[Gateway, AsyncOpenAI]]:
    async with (
        gateway(engine or fake_engine(max_model_len=1024), **settings) as server,
        AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def seen(server: Gateway) -> str:
    """The prompt that the engine was given last."""
    return chat_tokenizer().decode(server.engine.last.prompt, skip_special_tokens=False)


async def test_a_text_is_answered_and_what_was_asked_is_echoed() -> None:
    async with served() as (server, client):
        response = await client.responses.create(
            model="tiny",
            input="Hi",
            instructions="Be brief.",
            max_output_tokens=200,
            temperature=0.5,
            top_p=0.9,
            metadata={"who": "me"},
            extra_body={"top_k": 5, "seed": 7},
        )
        params = server.engine.last.params
        assert seen(server) == "<|system|>Be brief.<|user|>Hi<|assistant|>"
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (200, 0.5, 0.9, 5, 7)
    assert (response.object, response.status, response.output_text) == ("response", "completed", ANSWER)
    (message,) = response.output
    assert (message.type, message.status) == ("message", "completed")
    assert (response.instructions, response.metadata, response.store) == ("Be brief.", {"who": "me"}, True)  # type: ignore[attr-defined]
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 200)
    assert response.usage is not None
    tokens = (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens)
    assert tokens == (14, len(ANSWER.encode()) + 1, 14 + len(ANSWER.encode()) + 1)
    assert response.usage.input_tokens_details.cached_tokens == 2


async def test_a_stream_is_typed_events_in_the_documented_order() -> None:
    async with served() as (_, client):
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        events = [event async for event in stream]
        async with client.responses.stream(model="tiny", input="Hi") as helper:
            final = await helper.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert len(deltas) > 10
    assert "".join(event.delta for event in deltas) == ANSWER
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert last.type == "response.completed"
    assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)
    assert last.response.output_text == final.output_text == ANSWER


async def test_an_output_that_is_cut_is_incomplete() -> None:
    async with served() as (_, client):
        response = await client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
        stream = await client.responses.create(model="tiny", input="Hi", max_output_tokens=3, stream=True)
        last = [event async for event in stream][-1]
    for cut in (response, last.response):  # type: ignore[union-attr]
        assert (cut.status, cut.output_text) == ("incomplete", "The")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert last.type == "response.incomplete"


async def test_a_conversation_goes_on_from_a_response_that_is_kept() -> None:
    async with served(fake_engine(tokens=tuple(b"yes"), max_model_len=1024)) as (server, client):
        first = await client.responses.create(model="tiny", input="One", instructions="Once")
        items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Two"}]}]
        second = await client.responses.create(model="tiny", input=items, previous_response_id=first.id)
        assert seen(server) == "<|user|>One<|assistant|>yes<|user|>Two<|assistant|>"
        stream = await client.responses.create(
            model="tiny", input="Three", previous_response_id=second.id, stream=True, store=False
        )
        third = [event async for event in stream][-1].response  # type: ignore[union-attr]
        assert seen(server).startswith("<|user|>One<|assistant|>yes<|user|>Two<|assistant|>yes<|user|>Three")
        assert second.previous_response_id == first.id
        assert (await client.responses.retrieve(second.id)).output_text == "yes"
        listed = (await client.responses.input_items.list(second.id)).data
        assert [item.content[0].text for item in listed] == ["Two"]  # type: ignore[union-attr]
        await client.responses.delete(second.id)
        for gone in (second.id, third.id):
            with pytest.raises(openai.NotFoundError, match="give all items in input"):
                await client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="tiny", input="x", previous_response_id=second.id)


async def test_a_server_that_keeps_nothing_says_so() -> None:
    async with served(max_stored_responses=0) as (_, client):
        first = await client.responses.create(model="tiny", input="One")
        with pytest.raises(openai.BadRequestError, match="keeps none"):
            await client.responses.create(model="tiny", input="Two", previous_response_id=first.id)


def stored(name: str, text: str = "") -> StoredResponse:
    return StoredResponse({"id": name}, [], [{"text": text}])


def test_what_is_kept_is_bounded_in_number_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    store = ResponseStore(2, 10.0, lambda: now)
    for name in ("a", "b", "c"):
        store.put("me", stored(name))
    assert len(store) == 2
    with pytest.raises(HttpError):
        store.get("me", "a")
    with pytest.raises(HttpError):
        store.get("you", "c")
    now = 11.0
    with pytest.raises(HttpError):
        store.get("me", "c")
    monkeypatch.setattr("allspan.client.gateway.responses.store.MAX_BYTES", 400)
    store.put("me", stored("d", "x" * 300))
    store.put("me", stored("e", "x" * 500))
    assert store.get("me", "d")
    assert len(store) == 1
    store.put("me", stored("f", "x" * 300))
    assert store.get("me", "f")
    assert len(store) == 1


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather now",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALLS = """<think>Two cities.</think>I look.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>"""


async def test_thinking_text_and_calls_are_items_of_their_own() -> None:
    engine = fake_engine(tokens=tuple(CALLS.encode()), max_model_len=4096)
    async with served(engine, reasoning_parser="qwen3") as (server, client):
        whole = await client.responses.create(model="tiny", input="Weather?", tools=[WEATHER], store=False)
        stream = await client.responses.create(model="tiny", input="Weather?", tools=[WEATHER], stream=True)
        events = [event async for event in stream]
        async with client.responses.stream(model="tiny", input="Weather?", tools=[WEATHER]) as helper:
            final = await helper.get_final_response()
        outputs: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"{18 + place} degrees"}
            for place, item in enumerate(final.output[2:])
            if item.type == "function_call"
        ]
        engine.tokens = tuple(b"Fine.")
        await client.responses.create(model="tiny", input=outputs, previous_response_id=final.id, tools=[WEATHER])
        prompt = seen(server)
    for response in (whole, events[-1].response, final):  # type: ignore[union-attr]
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        thought, message, first, second = response.output
        assert thought.content[0].text == "Two cities."  # type: ignore[union-attr, index]
        assert (message.content[0].text, response.output_text) == ("I look.", "I look.")  # type: ignore[union-attr]
        assert [json.loads(call.arguments) for call in (first, second)] == [{"city": "Paris"}, {"city": "Rome"}]  # type: ignore[union-attr]
        assert {call.name for call in (first, second)} == {"weather"}  # type: ignore[union-attr]
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == len("<think>Two cities.</think>")
    told = [event.type for event in events]
    assert told.count("response.output_item.added") == told.count("response.output_item.done") == 4
    assert told.count("response.function_call_arguments.done") == 2
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas if event.output_index == 2) == '{"city": "Paris"}'
    assert "response.reasoning_text.delta" in told
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert prompt.index("Rome") < prompt.index("18 degrees") < prompt.index("19 degrees")


class Place(BaseModel):
    city: str


async def test_an_answer_in_a_form_is_parsed() -> None:
    async with served(fake_engine(tokens=tuple(b'{"city": "Paris"}'), max_model_len=1024)) as (server, client):
        response = await client.responses.parse(model="tiny", input="Where?", text_format=Place)
        grammar = server.engine.last.params.grammar
    assert response.output_parsed == Place(city="Paris")
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)["required"]) == ("json_schema", ["city"])


async def test_a_tool_may_be_demanded() -> None:
    async with served() as (server, client):
        await client.responses.create(
            model="tiny", input="x", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}
        )
        grammar = server.engine.last.params.grammar
        refused = await server.post(
            "/v1/responses", input="x", tools=[WEATHER], tool_choice={"type": "function", "name": "other"}
        )
        nameless = await server.post("/v1/responses", input="x", tools=[{"type": "function", "name": "a b"}])
    assert grammar is not None
    assert (refused.status_code, "not among tools" in refused.text) == (400, True)
    assert "tools[0].name is 'a b'" in nameless.text


async def test_log_probabilities_come_when_they_are_included() -> None:
    async with served() as (_, client):
        include: Any = ["message.output_text.logprobs"]
        whole = await client.responses.create(
            model="tiny", input="Hi", include=include, top_logprobs=2, max_output_tokens=3
        )
        stream = await client.responses.create(model="tiny", input="Hi", include=include, stream=True)
        deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    (part,) = whole.output[0].content  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs] == ["T", "h", "e"]  # type: ignore[union-attr]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]  # type: ignore[union-attr]
    pieces = [bytes(byte for entry in event.logprobs for byte in entry.bytes) for event in deltas]  # type: ignore[attr-defined]
    assert b"".join(pieces).decode() == ANSWER


async def test_a_failure_within_a_stream_is_its_last_event() -> None:
    async with served(fake_engine(fail_after=3)) as (_, client):
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        events = [event async for event in stream]
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="tiny", input="Hi")
    last = events[-1]
    assert last.type == "response.failed"
    assert (last.response.status, last.response.output_text) == ("failed", "The")
    assert last.response.error is not None
    assert "rank 1" in last.response.error.message


async def test_a_stream_that_runs_can_be_cancelled_by_its_id() -> None:
    async with served(fake_engine(endless=True, step_s=0.002, max_model_len=10_000)) as (server, client):
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        events = [await anext(stream) for _ in range(4)]
        name = events[0].response.id  # type: ignore[union-attr]
        answer = await server.http.post(f"/v1/responses/{name}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert last.response.status == "cancelled"
        await eventually(lambda: not server.engine.running)
        again = await server.http.post(f"/v1/responses/{name}/cancel")
        assert (again.status_code, "is cancelled" in again.text) == (400, True)
        assert (await server.http.post("/v1/responses/resp_x/cancel")).status_code == 404


async def test_tokens_of_an_input_are_counted() -> None:
    async with served() as (_, client):
        counted = await client.responses.input_tokens.count(model="tiny", input="Hi")
    assert counted.input_tokens == 4


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "input is missing"),
    ({"input": []}, "input", "an empty list"),
    ({"input": 7}, "input", "a int"),
    ({"input": ["x"]}, "input", "input[0] is 'x'"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input", "input[0].role is 'wizard'"),
    ({"input": [{"role": "user", "content": []}]}, "input", "input[0].content is []"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "give the item itself"),
    ({"input": [{"type": "computer_call"}]}, "input", "'computer_call'"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input", "input[0].call_id is None"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "after a prompt of 3 tokens, at most 1021"),
    ({"max_tokens": 5}, "max_tokens", "not a field"),
    ({"n": 2}, "n", "not a field"),
    ({"max_output_token": 5}, "max_output_token", "did you mean max_output_tokens?"),
    ({"temprature": 0}, "temprature", "did you mean temperature?"),
    ({"background": True}, "background", "ask with stream"),
    ({"conversation": "c"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"truncation": "auto"}, "truncation", "leave items out"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] is of type 'web_search'"),
    ({"text": {"format": {"type": "yaml"}}}, "text", "must be one of"),
    ({"text": {"colour": 1}}, "text", "text"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
    ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "too long"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "17 entries, at most 16"),
    ({"temperature": 101}, "temperature", "from 0 to 100"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"model": "other"}, None, "not served"),
]


async def test_what_does_not_fit_is_refused_by_name() -> None:
    async with served() as (server, _):
        for body, param, words in REFUSED:
            response = await server.post("/v1/responses", **({"input": "x"} | body))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (404 if param is None else 400, param), body
            assert words in error["message"]
