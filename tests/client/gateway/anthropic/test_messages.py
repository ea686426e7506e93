"""Anthropic's Messages with Anthropic's own SDK: texts, tools, thinking, structured output, counts and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from support.chat_scenarios import CALL, FUNCTION, THINKING
from support.chat_tokenizer import EOS, VOCAB_SIZE
from support.gateway import Gateway, gateway
from support.openai_scenarios import SCRIPTS
from support.scripted_engine import ScriptedEngine

TOOL: dict[str, Any] = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
    "cache_control": {"type": "ephemeral"},
}
TEXTS = SCRIPTS | {"[partial]": CALL[:4], "[answered]": ("It rains.",), "[both]": (*THINKING, "\n", *CALL)}


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[Gateway, AsyncAnthropic]]:
    engine = ScriptedEngine((), EOS, VOCAB_SIZE, max_model_len=4096, scripts=TEXTS)
    async with (
        gateway(engine, **settings) as server,
        AsyncAnthropic(base_url=server.http_address, api_key="sk-any-key", max_retries=0) as client,
    ):
        yield server, client


def asked(text: Any = "[plain]", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": text}], **fields}


def prompt(server: Gateway) -> str:
    tokens = server.engine.last.prompt
    special = {258: "<user>", 259: "<assistant>", 260: "<system>"}
    return "".join(special.get(token) or chr(token) for token in tokens)


async def both(client: AsyncAnthropic, **request: Any) -> anthropic.types.Message:
    """The message, whole, once the one that the SDK makes of the stream was found to be the same."""
    whole = await client.messages.create(**request)
    async with client.messages.stream(**request) as stream:
        streamed = await stream.get_final_message()
    left, right = (message.to_dict() | {"id": ""} for message in (whole, streamed))
    for message in (left, right):
        for block in message["content"]:  # type: ignore[union-attr, str-bytes-safe]
            block.pop("parsed_output", None)  # type: ignore[union-attr]
            if block["type"] == "tool_use":  # type: ignore[index]
                assert block.pop("id").startswith("toolu_")  # type: ignore[union-attr]
    assert left.pop("content") == right.pop("content")
    assert {name: left[name] for name in right if left.get(name) != right[name]} == {}
    return whole


async def test_a_text_whole_and_streamed() -> None:
    async with served() as (server, client):
        message = await both(
            client, **asked(system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}])
        )
        assert (message.content[0].text, message.stop_reason) == ("Hello wörld, bye.", "end_turn")  # type: ignore[union-attr]
        assert message.model == "tiny"
        assert message.id.startswith("msg_")
        assert prompt(server) == "<system>Be\n\nbrief<user>[plain]<assistant>"
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (17, 2, 19)
        stopped = await both(client, **asked(stop_sequences=[", b"]))
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", b")
        cut = await both(client, **asked(max_tokens=3))
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
        large = await client.messages.create(**asked(max_tokens=20_000))
        assert large.stop_reason == "end_turn"
        assert server.engine.last.params.max_tokens == 4096 - 9


async def test_the_events_of_a_stream_are_those_of_the_api() -> None:
    async with served(reasoning_parser="qwen3") as (server, _):
        body = asked("[both]", stream=True, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 50})
        text = (await server.post("/v1/messages", **body)).text
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    kinds = [event["delta"]["type"] if "index" in event and "delta" in event else event["type"] for event in events]
    merged = [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]]
    opened = ["content_block_start", "content_block_stop"]
    assert merged == [
        *("message_start", "ping", opened[0], "thinking_delta", "signature_delta", opened[1], opened[0], "text_delta"),
        *(opened[1], opened[0], "input_json_delta", opened[1], "message_delta", "message_stop"),
    ]
    assert [event["content_block"]["type"] for event in events if "content_block" in event] == [
        *("thinking", "text", "tool_use")
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_tools_are_called_and_their_results_read() -> None:
    async with served() as (server, client):
        message = await both(client, **asked("[tools]", tools=[TOOL]))
        text, call = message.content
        assert message.stop_reason == "tool_use"
        assert (text.type, call.type) == ("text", "tool_use")
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})  # type: ignore[union-attr]
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
            {"type": "text", "text": "[answered]"},
        ]
        calls = [
            {"type": "tool_use", "id": f"toolu_{i}", "name": "get_weather", "input": {"city": "é"}} for i in (1, 2)
        ]
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": calls}]
        request = asked() | {"messages": [*history, {"role": "user", "content": results}], "tools": [TOOL]}
        answer = await client.messages.create(**request)
        assert answer.content[0].text == "It rains."  # type: ignore[union-attr]
        told = prompt(server)
        assert told.index("rain") < told.index("Error: no such city") < told.index("[answered]")
        assert told.count('"city"') >= 3
        partial = await client.messages.create(**asked("[partial]", tools=[TOOL]))
        assert partial.content[0].input == {"city": "Par"}  # type: ignore[union-attr]


async def test_tool_choices_reach_the_conversation() -> None:
    async with served() as (server, client):
        for choice, has_grammar, shown in (
            ({"type": "auto"}, False, True),
            ({"type": "any", "disable_parallel_tool_use": True}, True, True),
            ({"type": "tool", "name": "get_weather"}, True, True),
            ({"type": "none"}, False, False),
        ):
            await client.messages.create(**asked("[plain]", tools=[TOOL], tool_choice=choice))
            assert (server.engine.last.params.grammar is not None) == has_grammar, choice
            assert ("get_weather" in prompt(server)) == shown


async def test_thinking_is_told_where_it_is_asked_for() -> None:
    async with served(reasoning_parser="qwen3") as (_, client):
        request = asked("[thinking]", thinking={"type": "enabled", "budget_tokens": 20})
        thought, text = (await both(client, **request)).content
        assert (thought.thinking, text.text) == ("Is it Paris?", "It is Paris.")  # type: ignore[union-attr]
        (only,) = (await both(client, **asked("[thinking]"))).content
        assert only.text == "It is Paris."  # type: ignore[union-attr]


async def test_the_last_message_of_the_assistant_is_continued_and_thoughts_are_read() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "[plain]"}}]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "Well"}]},
    ]
    async with served() as (server, client):
        await client.messages.create(**(asked() | {"messages": messages}))  # type: ignore[arg-type]
        assert prompt(server) == "<user>[plain]<assistant>Well"


async def test_sampling_and_structured_output_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    sampling = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 5}
    async with served() as (server, client):
        await client.messages.create(
            **asked("[json]", metadata={"user_id": "me"}, output_config=form, extra_body=sampling)
        )
        params = server.engine.last.params
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 7, 0.9, 5)
    assert params.grammar is not None
    assert json.loads(params.grammar.text) == schema


async def test_tokens_are_counted() -> None:
    async with served() as (_, client):
        messages: Any = [{"role": "user", "content": "Hi"}]
        counted = await client.messages.count_tokens(model="tiny", messages=messages)
        long = await client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert (counted.input_tokens, long.input_tokens) == (4, 5002)


async def test_what_such_clients_send_by_habit_is_taken() -> None:
    """As coding agents do: betas, cache marks, a billing header in the system prompt, an organisation in the name."""
    headers = {
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-version": "2023-06-01",
    }
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1"},
        {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    text = [{"type": "text", "text": "[plain]", "cache_control": {"type": "ephemeral"}}]
    extra = {
        "context_management": {"edits": []},
        "service_tier": "auto",
        "betas": ["x"],
        "thinking": {"type": "adaptive"},
    }
    extra |= {"n": 1, "logprobs": False, "parallel_tool_calls": True, "response_format": {"type": "text"}}
    async with served(strict=True) as (server, client):
        request = asked(text, system=system, extra_headers=headers, extra_body=extra) | {"model": "Org/TINY"}
        assert (await client.messages.create(**request)).stop_reason == "end_turn"
        assert prompt(server) == "<system>You code.<user>[plain]<assistant>"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": []}, "messages is missing or empty"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role is 'system', must be user or assistant"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0] is of type 'i",
    ),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0] is 7, must be a block"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id is missing"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}]}, "content[0].input is 1"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: messages has 5002 tokens"),
    ({"system": [{"type": "image"}]}, "system[0] is of type 'image'"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0] is of type 'web_search_20250305'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name is 'f g'"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, "tool_choice names 'f'"),
    ({"tool_choice": "any"}, "tool_choice is 'any', must be {'type': 'auto'}"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is None"),
    ({"thinking": {"type": "enabled", "budget_tokens": 400}}, "must be less than max_tokens, which is 400"),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format is"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is given"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequence": ["x"]}, "did you mean stop_sequences?"),
    ({"response_format": {"type": "json_object"}}, "it is output_config.format here"),
    ({"n": 4}, "n is 4: a request has one answer here"),
    ({"logprobs": True}, "logprobs is True: an answer here has no logprobs"),
    ({"max_completion_tokens": 5}, "it is max_tokens here"),
    ({"stop": ["x"], "stop_sequences": ["y"]}, "it is stop_sequences here"),
    ({"reasoning_effort": "high"}, "it is output_config.effort here"),
    ({"parallel_tool_calls": False}, "it is tool_choice.disable_parallel_tool_use here"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is"),
    ({"tools": [{"name": "f.function.g tools", "input_schema": {}}]}, "tools[0].name is 'f.function.g tools'"),
    ({"f" + str(place): 1 for place in range(65)}, "does not know 65 of the fields, must be at most 64"),
]


async def test_what_does_not_fit_is_refused_in_the_words_of_the_api() -> None:
    async with served() as (server, _):
        for body, words in REFUSED:
            response = await server.post("/v1/messages", **(asked() | body))
            told = response.json()
            assert (response.status_code, told["type"], told["error"]["type"]) == (
                400,
                "error",
                "invalid_request_error",
            )
            assert words in told["error"]["message"], told


async def test_errors_have_the_classes_of_the_sdk() -> None:
    async with served(api_key=("sk-right-key",)) as (server, stranger):
        with pytest.raises(anthropic.AuthenticationError, match="not known here"):
            await stranger.messages.create(**asked())
        client = stranger.copy(api_key="sk-right-key")
        assert (await client.messages.create(**asked())).stop_reason == "end_turn"
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await client.messages.create(**(asked() | {"model": "claude-opus"}))
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            await client.messages.create(**asked("[down]"))
        with pytest.raises(anthropic.APIStatusError, match="rank 1"):
            async with client.messages.stream(**asked("[breaks off]")) as stream:
                await stream.get_final_message()
        wrong = client.copy(base_url=f"{server.http_address}/v1")
        with pytest.raises(
            anthropic.NotFoundError, match="it is /v1/messages: the client's base URL must not contain /v1"
        ):
            await wrong.messages.create(**asked())
