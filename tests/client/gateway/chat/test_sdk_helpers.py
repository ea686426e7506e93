"""What the official SDKs build on chunks: streams put together, tools run, answers parsed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from support.chat_scenarios import SCRIPTS, STRICT_TOOLS, TOOLS
from support.chat_tokenizer import EOS, VOCAB_SIZE
from support.gateway import gateway
from support.scripted_engine import ScriptedEngine

QUESTION: list[Any] = [{"role": "user", "content": "[text and tools]"}]


def engine() -> ScriptedEngine:
    return ScriptedEngine((), EOS, VOCAB_SIZE, max_model_len=4096, scripts=SCRIPTS)


async def test_python_stream_helper_tells_events_and_the_whole() -> None:
    async with gateway(engine()) as server, AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="x") as client:
        tools: Any = STRICT_TOOLS
        async with client.chat.completions.stream(model="tiny", messages=QUESTION, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}
    assert final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("content.delta") == 2
    assert kinds.count("tool_calls.function.arguments.delta") >= 3
    assert kinds.count("tool_calls.function.arguments.done") == 1


async def test_message_of_the_sdk_goes_back_as_it_came() -> None:
    async with gateway(engine()) as server, AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="x") as client:
        tools: Any = TOOLS
        messages = list(QUESTION)
        first = await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        message = first.choices[0].message
        assert message.tool_calls is not None
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain [tool result]"}
        messages += [message, result]
        second = await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        assert second.choices[0].message.content == "It rains in Paris."
        prompt = bytes(token for token in server.engine.last.prompt if token < 256).decode()
    assert 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<tool_response>\nrain [tool result]\n</tool_response>" in prompt


async def test_node_runs_the_tools_and_reads_the_stream(node_folder: Path) -> None:
    async with gateway(engine()) as server:
        words = ("node", str(node_folder / "chat_helpers.mjs"), server.http_address, "[text and tools]")
        process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, stderr.decode()
    came = json.loads(stdout)
    assert came["asked"] == ["Paris", "Paris"]
    assert came["results"] == {"whole": "It rains in Paris.", "streamed": "It rains in Paris."}
    assert "".join(came["fragments"]) == '{"city": "Paris"}'
    assert came["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert came["message"]["content"] == "Let me see."
