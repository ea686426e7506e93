"""Transcripts of completions, responses, tokens, models and their errors with the official SDKs, field by field, the
same for Python and Node.js.

`ALLSPAN_WRITE_GOLDENS=1 pytest tests/client/gateway/test_openai_golden.py` writes them anew: read the difference.
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

from openai import APIError, APIStatusError, AsyncOpenAI

from support.chat_tokenizer import EOS, VOCAB_SIZE
from support.gateway import Gateway, gateway
from support.openai_scenarios import SCENARIOS, SCRIPTS, SETTINGS, Scenario
from support.scripted_engine import ScriptedEngine

GOLDENS = Path(__file__).with_name("goldens")
MADE_UP = {
    r"\b(cmpl-|resp_|msg_|rs_|fc_)[0-9a-f]{32}": r"\g<1>0",
    r"call_[0-9a-f]{24}": "call_0",
    r"fp_[0-9a-f]{10}": "fp_0",
    r'"(created|created_at|completed_at)": [0-9]{10}(\.0)?': r'"\g<1>": 0',
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


async def made(client: AsyncOpenAI, url: str, scenario: Scenario, chunks: list[Any]) -> Any:
    call, request = scenario.call, scenario.request
    extra: Any = {"extra_body": scenario.extra} if scenario.extra else {}
    if call.startswith("POST "):
        return await client.post(url + call[5:], cast_to=object, body=request)
    if call == "models.list":
        return {"data": [model.to_dict() async for model in client.models.list()]}
    if call == "responses.text":
        return {"text": (await client.responses.create(**request)).output_text}
    if call == "responses.final":
        async with client.responses.stream(**request) as stream:
            return {"text": (await stream.get_final_response()).output_text}
    method: Any = client
    for name in call.split("."):
        method = getattr(method, name)
    answer = await method(**request, **extra)
    if not request.get("stream"):
        return answer.to_dict()
    async for chunk in answer:
        chunks.append(chunk.to_dict())
    return None


async def asked(client: AsyncOpenAI, url: str, scenario: Scenario) -> dict[str, Any]:
    chunks: list[Any] = []
    came: dict[str, Any] = {}
    try:
        answer = await made(client, url, scenario, chunks)
        if answer is not None:
            came["answer"] = answer
    except APIError as error:
        body: Any = error.body
        status = error.status_code if isinstance(error, APIStatusError) else None
        told = {"message": body["message"], "type": error.type, "param": error.param, "code": error.code}
        came["error"] = {"class": type(error).__name__, "status": status, **told}
    return {"chunks": chunks, **came} if scenario.request.get("stream") else came


def normal(came: dict[str, Any]) -> dict[str, Any]:
    """Without what is made up anew and what one SDK adds; the chunks of several choices one choice after the other."""
    if "chunks" in came:
        indexes = [[choice["index"] for choice in chunk.get("choices", ())] or [99] for chunk in came["chunks"]]
        order = sorted(range(len(indexes)), key=indexes.__getitem__)
        came = came | {"chunks": [came["chunks"][place] for place in order]}
    if isinstance(answer := came.get("answer"), dict):
        answer.pop("output_text", None)
    text = json.dumps(came, indent=1, ensure_ascii=False)
    for pattern, name in MADE_UP.items():
        text = re.sub(pattern, name, text)
    normalised: dict[str, Any] = json.loads(text)
    return normalised


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text())
    return found


async def test_python_sdk_reads_what_the_transcripts_say() -> None:
    came = {}
    async with gateways() as servers:
        for scenario in SCENARIOS:
            url = servers[scenario.settings].http_address
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                came[scenario.name] = normal(await asked(client, url, scenario))
    if os.environ.get("ALLSPAN_WRITE_GOLDENS"):
        GOLDENS.mkdir(exist_ok=True)
        for name, value in came.items():
            (GOLDENS / f"{name}.json").write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    for name, value in came.items():
        assert value == golden(name), name


async def test_node_sdk_reads_what_the_transcripts_say(node_folder: Path, tmp_path: Path) -> None:
    async with gateways() as servers:
        calls = [
            {
                "name": scenario.name,
                "url": servers[scenario.settings].http_address,
                "call": scenario.call,
                "request": scenario.request | scenario.extra,
            }
            for scenario in SCENARIOS
        ]
        (tmp_path / "calls.json").write_text(json.dumps(calls))
        words = ("node", str(node_folder / "openai.mjs"), str(tmp_path / "calls.json"))
        process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, stderr.decode()
    for name, value in json.loads(stdout).items():
        assert normal(value) == golden(name), name


def test_every_transcript_is_of_a_scenario() -> None:
    assert {path.stem for path in GOLDENS.glob("*.json")} == {scenario.name for scenario in SCENARIOS}


def test_streamed_completions_add_up_to_the_whole_ones() -> None:
    for scenario in SCENARIOS:
        whole = golden(scenario.name).get("answer")
        if (
            scenario.call != "completions.create"
            or whole is None
            or not (GOLDENS / f"{scenario.name}-stream.json").exists()
        ):
            continue
        chunks = golden(f"{scenario.name}-stream")["chunks"]
        for choice in whole["choices"]:
            pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"], scenario.name
            assert pieces[-1]["finish_reason"] == choice["finish_reason"]
            for field, values in (choice["logprobs"] or {}).items():
                assert [value for piece in pieces for value in piece["logprobs"][field]] == values, scenario.name


def test_streamed_responses_end_with_the_whole_ones() -> None:
    for scenario in SCENARIOS:
        streamed = GOLDENS / f"{scenario.name}-stream.json"
        if scenario.call != "responses.create" or not streamed.exists() or "answer" not in golden(scenario.name):
            continue
        events = json.loads(streamed.read_text())["chunks"]
        assert events[-1]["response"] == golden(scenario.name)["answer"], scenario.name
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == events[-1][
            "response"
        ]["output"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
