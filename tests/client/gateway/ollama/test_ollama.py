"""Ollama's API with Ollama's own SDK: conversations, prompts, tools, thinking, forms, models and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ollama import AsyncClient, ResponseError

from allspan.client.gateway.ollama.messages import read_messages
from allspan.protos.cluster.cluster_file import ClusterInfo
from support.chat_scenarios import TOOLS
from support.chat_tokenizer import EOS, TEMPLATE, VOCAB_SIZE
from support.gateway import Gateway, gateway
from support.openai_scenarios import SCRIPTS
from support.scripted_engine import ScriptedEngine

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAME = "Org/Tiny"


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[Gateway, AsyncClient]]:
    engine = ScriptedEngine((), EOS, VOCAB_SIZE, max_model_len=4096, scripts=SCRIPTS)
    async with (
        gateway(engine, served_model_name=(NAME, "other"), **settings) as server,
        AsyncClient(host=server.http_address, trust_env=False) as client,
    ):
        yield server, client


def asked(text: str = "[plain]", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny:latest", "messages": [{"role": "user", "content": text}], **fields}


def prompt(server: Gateway) -> str:
    special = {258: "<user>", 259: "<assistant>", 260: "<system>"}
    return "".join(special.get(token) or chr(token) for token in server.engine.last.prompt)


async def test_a_conversation_whole_and_streamed() -> None:
    async with served() as (server, client):
        answer = await client.chat(**asked())
        assert (answer.message.content, answer.done, answer.done_reason) == ("Hello wörld, bye.", True, "stop")
        assert answer.model == "tiny:latest"
        assert (answer.prompt_eval_count, answer.eval_count) == (9, 19)
        assert (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration) == (0, 1_000_000, 1_000_000)
        assert answer.total_duration
        parts = [part async for part in await client.chat(**asked(), stream=True)]
        assert "".join(part.message.content or "" for part in parts) == "Hello wörld, bye."
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].eval_count == 19
        raw = await server.http.post("/api/chat", content=json.dumps(asked()))  # as curl does: streamed, no type
        assert raw.headers["content-type"] == "application/x-ndjson"
        assert json.loads(raw.text.splitlines()[-1])["done"] is True


async def test_a_prompt_is_a_question_or_continued_as_it_is() -> None:
    async with served() as (server, client):
        answer = await client.generate(model="other", prompt="[plain]", system="Be brief.")
        assert (answer.response, answer.done_reason) == ("Hello wörld, bye.", "stop")
        assert prompt(server) == "<system>Be brief.<user>[plain]<assistant>"
        raw = await client.generate(model="other", prompt="[plain]", raw=True, options={"num_predict": 3})
        assert (raw.response, raw.done_reason, prompt(server)) == ("Hel", "length", "[plain]")
        for loaded in (await client.generate(model="other"), await client.chat(model="other", messages=[])):
            assert (loaded.done, loaded.done_reason) == (True, "load")


async def test_options_reach_the_sampler() -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "repeat_penalty": 1.5}
    options |= {"seed": 5, "stop": ["zz"], "presence_penalty": 0.25, "frequency_penalty": -0.5, "num_predict": 9}
    habits = {"num_ctx": 8192, "num_gpu": 99, "mirostat": 0, "repeat_last_n": 64, "num_keep": 4, "invented": 1}
    async with served() as (server, client):
        await client.chat(**asked(), options=options | habits, keep_alive="5m")
        params = server.engine.last.params
        assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (
            0.5,
            7,
            0.9,
            0.1,
            0.8,
        )
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.25, -0.5)
        assert (params.seed, params.stop, params.max_tokens) == (5, ("zz",), 9)
        await client.chat(
            **asked(), options={"num_predict": 10**6, "seed": -1, "repeat_penalty": 1.5, "repeat_last_n": 0}
        )
        params = server.engine.last.params
        assert (params.max_tokens, params.seed, params.repetition_penalty) == (4096 - 9, None, 1.0)
        await client.chat(**asked(), options={"num_predict": -1})
        assert server.engine.last.params.max_tokens == 4096 - 9


async def test_tools_are_called_and_their_results_read() -> None:
    async with served() as (server, client):
        whole = (await client.chat(**asked("[tools]"), tools=TOOLS)).message
        parts = [part.message async for part in await client.chat(**asked("[tools]"), tools=TOOLS, stream=True)]
        streamed = [call for part in parts for call in part.tool_calls or ()]
        assert (whole.content, "".join(part.content or "" for part in parts)) == ("Let me see.", "Let me see.")
        for calls in (whole.tool_calls, streamed):
            assert [(call.function.name, call.function.arguments) for call in calls or ()] == [
                ("get_weather", {"city": "Paris"})
            ]
        history = [
            {"role": "user", "content": "x"},
            whole,
            {"role": "tool", "content": "It rains", "tool_name": "get_weather"},
        ]
        await client.chat(model="tiny", messages=[*history, {"role": "user", "content": "[plain]"}], tools=TOOLS)
        told = prompt(server)
        assert told.index('"Paris"') < told.index("It rains") < told.index("[plain]")


def test_calls_of_several_rounds_have_ids_of_their_own() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    turn = [
        {"role": "assistant", "tool_calls": [call, call]},
        *[{"role": "tool", "content": "x", "tool_name": "f"}] * 2,
    ]
    read = read_messages(turn * 3)
    ids = [call["id"] for message in read for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 6
    assert [message["tool_call_id"] for message in read if message["role"] == "tool"] == ids


async def test_thinking_is_told_apart_unless_it_is_off() -> None:
    async with served(reasoning_parser="qwen3") as (_, client):
        for think in (None, True, "high"):
            message = (await client.chat(**asked("[thinking]"), think=think)).message  # type: ignore[arg-type]
            assert (message.thinking, message.content) == ("Is it Paris?", "It is Paris.")
        parts = [
            part async for part in await client.generate(model="tiny", prompt="[thinking]", think=True, stream=True)
        ]
        assert "".join(part.thinking or "" for part in parts) == "Is it Paris?"
        assert "".join(part.response for part in parts) == "It is Paris."
        off = (await client.chat(**asked("[thinking]"), think=False)).message
        assert (off.thinking, off.content) == (None, "It is Paris.")


async def test_an_answer_follows_its_format() -> None:
    async with served() as (server, client):
        await client.chat(**asked("[json]"), format=CITY)
        grammar = server.engine.last.params.grammar
        assert grammar is not None
        assert json.loads(grammar.text) == CITY
        await client.generate(model="tiny", prompt="[json]", format="json")
        grammar = server.engine.last.params.grammar
        assert grammar is not None
        assert grammar.kind == "json_object"


async def test_models_are_listed_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    info = ClusterInfo(1, "ready", "tiny", str(tmp_path), 4096, VOCAB_SIZE, (EOS,))
    monkeypatch.setattr(ScriptedEngine, "cluster", property(lambda _: info))
    async with served(reasoning_parser="qwen3") as (server, client):
        first, second = (await client.list()).models
        assert (first.model, second.model, first.size) == ("Org/Tiny:latest", "other:latest", 100)
        assert first.details is not None
        assert (first.details.family, first.details.format) == ("llama", "safetensors")
        shown = await client.show("ORG/tiny")
        assert shown.capabilities == ["completion", "embedding", "tools", "thinking"]
        assert shown.template == TEMPLATE
        assert (shown.modelinfo or {})["llama.context_length"] == 4096
        assert [model.context_length for model in (await client.ps()).models] == [4096, 4096]
        assert (await server.http.get("/api/version")).json()["version"].count(".") == 2
        assert (await server.http.head("/")).status_code == 200


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/api/chat", {"model": "llama3"}, 404, "model 'llama3' is not served here"),
    ("/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role is 'wizard'"),
    ("/api/chat", {"messages": [{"role": "user", "content": 7}]}, 400, "messages[0].content is 7"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "only text is supported"),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, 400, "tool_calls[0] is"),
    ("/api/chat", {"options": {"temperature": -1}}, 400, "options.temperature is -1"),
    ("/api/chat", {"options": {"temprature": 1}}, 400, "options: 'temprature' is not a field"),
    ("/api/chat", {"options": {"num_predict": "9"}}, 400, "options.num_predict is '9'"),
    ("/api/chat", {"options": {"num_predict": 0}}, 400, "options.num_predict is 0, must be at least 1, or -1"),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": 0}}, 400, "must be at least 1, or -1"),
    ("/api/chat", {"format": "yaml"}, 400, "format is 'yaml', must be \"json\" or a JSON schema"),
    ("/api/chat", {"format": {"type": "thing"}}, 400, "format"),
    ("/api/chat", {"think": "lots"}, 400, "think is 'lots'"),
    ("/api/chat", {"message": [], "messages": None}, 400, "did you mean messages?"),
    ("/api/generate", {"prompt": 7}, 400, "prompt is 7"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "fill-in-the-middle"),
    ("/api/generate", {"prompt": "x", "images": ["aGk="]}, 400, "images has 1 images"),
    ("/api/pull", {"model": "x"}, 404, "no such endpoint"),
    ("/v1/api/chat", {}, 404, "it is /api/chat: the client's base URL must not contain /v1"),
]


async def test_what_does_not_fit_is_refused_in_the_shape_of_the_api() -> None:
    async with served() as (server, client):
        for path, body, status, words in REFUSED:
            answer = await server.post(path, **(asked(stream=False) if "chat" in path else {}) | body)
            error = answer.json()["error"]
            assert (answer.status_code, words in str(error)) == (status, True), answer.text
            assert isinstance(error, str) or path.startswith("/v1")
        page = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        assert (await server.http.post("/api/chat", content=json.dumps(asked()), headers=page)).status_code == 415
        with pytest.raises(ResponseError, match="rank 1") as caught:
            await client.chat(**asked("[down]"))
        assert caught.value.status_code == 503
        with pytest.raises(ResponseError, match="rank 1"):
            async for _ in await client.chat(**asked("[breaks off]"), stream=True):
                pass
    async with served(api_key=("sk-right-key",)) as (server, _):
        assert (await server.post("/api/chat", **asked())).json() == {
            "error": "no API key came with this call; send it as `Authorization: Bearer KEY`"
        }
