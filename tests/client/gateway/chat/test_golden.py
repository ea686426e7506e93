"""Transcripts of chat completions with the official SDKs, field by field, the same for Python and Node.js.

`ALLSPAN_WRITE_GOLDENS=1 pytest tests/client/gateway/chat/test_golden.py` writes them anew: read the difference.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI

from support.chat_scenarios import SCENARIOS, SCRIPTS, SETTINGS, Scenario
from support.chat_tokenizer import EOS, VOCAB_SIZE
from support.gateway import Gateway, gateway
from support.scripted_engine import ScriptedEngine

GOLDENS = Path(__file__).with_name("goldens")
MADE_UP = {
    r"chatcmpl-[0-9a-f]{32}": "chatcmpl-0",
    r"call_[0-9a-f]{24}": "call_0",
    r"fp_[0-9a-f]{10}": "fp_0",
    r'"created": [0-9]{10}': '"created": 0',
}


@asynccontextmanager
async def gateways() -> AsyncIterator[dict[str, Gateway]]:
    """One of each setting."""
    async with AsyncExitStack() as stack:
        found = {}
        for name, settings in SETTINGS.items():
            engine = ScriptedEngine((), EOS, VOCAB_SIZE, max_model_len=4096, scripts=SCRIPTS)
            found[name] = await stack.enter_async_context(gateway(engine, **settings))
        yield found


async def asked(client: AsyncOpenAI, scenario: Scenario) -> dict[str, Any]:
    try:
        answer = await client.chat.completions.create(**scenario.request, extra_body=scenario.extra or None)
        if not scenario.request.get("stream"):
            return {"answer": answer.to_dict()}
        chunks = []
        try:
            async for chunk in answer:
                chunks.append(chunk.to_dict())
        except APIError as error:
            return {"chunks": chunks, "error": described(error)}
        return {"chunks": chunks}
    except APIError as error:
        return {"error": described(error)}


def described(error: APIError) -> dict[str, Any]:
    body: Any = error.body
    status = error.status_code if isinstance(error, APIStatusError) else None
    values = {"message": body["message"], "type": error.type, "param": error.param, "code": error.code}
    return {"class": type(error).__name__, "status": status, **values}


def normal(came: dict[str, Any]) -> dict[str, Any]:
    """Without what is made up anew; the chunks of several choices one choice after the other."""
    if "chunks" in came:
        indexes = [[choice["index"] for choice in chunk["choices"]] or [99] for chunk in came["chunks"]]
        order = sorted(range(len(indexes)), key=indexes.__getitem__)
        came = came | {"chunks": [came["chunks"][place] for place in order]}
    text = json.dumps(came, indent=1, ensure_ascii=False)
    for pattern, name in MADE_UP.items():
        text = re.sub(pattern, name, text)
    normalised: dict[str, Any] = json.loads(text)
    return normalised


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text())
    return found


async def test_python_sdk_reads_what_the_transcripts_say() -> None:
    async with gateways() as servers:
        came = {}
        for scenario in SCENARIOS:
            url = servers[scenario.settings].http_address
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                came[scenario.name] = normal(await asked(client, scenario))
    if os.environ.get("ALLSPAN_WRITE_GOLDENS"):
        GOLDENS.mkdir(exist_ok=True)
        for name, value in came.items():
            (GOLDENS / f"{name}.json").write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    for name, value in came.items():
        assert value == golden(name), name


async def test_node_sdk_reads_what_the_transcripts_say(node_folder: Path, tmp_path: Path) -> None:
    async with gateways() as servers:
        requests = [
            {
                "name": scenario.name,
                "url": servers[scenario.settings].http_address,
                "request": scenario.request | scenario.extra,
            }
            for scenario in SCENARIOS
        ]
        (tmp_path / "requests.json").write_text(json.dumps(requests))
        words = ("node", str(node_folder / "chat.mjs"), str(tmp_path / "requests.json"))
        process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, stderr.decode()
    for name, value in json.loads(stdout).items():
        assert normal(value) == golden(name), name


def test_every_transcript_is_of_a_scenario() -> None:
    assert {path.stem for path in GOLDENS.glob("*.json")} == {scenario.name for scenario in SCENARIOS}


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS if scenario.request.get("stream")])
def test_streams_add_up_to_the_whole_answers(name: str) -> None:
    whole = GOLDENS / f"{name.removesuffix('-stream')}.json"
    streamed = golden(name)
    if not whole.exists() or "answer" not in (answer := json.loads(whole.read_text())) or "error" in streamed:
        return
    for choice in answer["answer"]["choices"]:
        chunks = [each for chunk in streamed["chunks"] for each in chunk["choices"] if each["index"] == choice["index"]]
        message = choice["message"]
        for field in ("content", "reasoning_content", "reasoning"):
            told = "".join(chunk["delta"].get(field) or "" for chunk in chunks)
            assert told == (message.get(field) or ""), field
        parts = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        calls = message.get("tool_calls", [])
        arguments = ["".join(p["function"]["arguments"] for p in parts if p["index"] == i) for i in range(len(calls))]
        assert arguments == [call["function"]["arguments"] for call in calls]
        assert [p["function"]["name"] for p in parts if "id" in p] == [call["function"]["name"] for call in calls]
        assert [chunk["finish_reason"] for chunk in chunks][-1] == choice["finish_reason"]
        assert [chunk["finish_reason"] for chunk in chunks][:-1] == [None] * (len(chunks) - 1)
