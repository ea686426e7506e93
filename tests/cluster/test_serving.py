"""One served cluster, asked in every way: the same greedy text, and bad input that harms nobody."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import ollama
import openai
import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos import inference_pb2, inference_pb2_grpc
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text import load_tokenizer
from support.node_client import node_client
from support.serving import Served, run_allspan, runtime_folder

pytestmark = pytest.mark.timeout(240)

QUESTION = "What is the capital of France?"
STORY = "Once upon a time"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with runtime_folder() as runtime:
        server = Served(
            model, "--ranks=2", "--oversubscribe", "--max-model-len=512", "--served-model-name=tiny", runtime=runtime
        )
        try:
            yield server.wait_ready()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def expected(served: Served, model: Path) -> dict[str, Any]:
    """The answer of a facade attached to the same cluster: token ids of the chat, and the text of the story."""
    ids = load_tokenizer(model).encode_chat([{"role": "user", "content": QUESTION}])
    with ClientEngine(attach=served.run_dir) as engine:
        chat, story = engine.generate([ids, STORY], GREEDY)
    return {"chat": chat.text, "story": story.text}


def sdk(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", timeout=60, max_retries=0)


def stub(channel: grpc.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


def test_the_openai_sdk_streams_the_same_chat(served: Served, expected: dict[str, Any]) -> None:
    with sdk(served) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == expected["chat"]
    assert len([piece for piece in pieces if piece]) > 1


def test_a_plain_completion_is_the_same(served: Served, expected: dict[str, Any]) -> None:
    with sdk(served) as client:
        answer = client.completions.create(model="tiny", prompt=STORY, temperature=0, max_tokens=24)
        assert client.models.list().data[0].id == "tiny"
    assert answer.choices[0].text == expected["story"]


def test_other_protocols_stream_the_same_text(served: Served, expected: dict[str, Any]) -> None:
    """Anthropic's and Ollama's with their own SDKs; llama-server's completion."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    greedy = {"temperature": 0, "num_predict": 24}
    with anthropic.Anthropic(base_url=served.http, api_key="none", timeout=60, max_retries=0) as client:
        asked = {"model": "tiny", "max_tokens": 24, "messages": messages, "extra_body": {"temperature": 0}}
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == expected["chat"]
        assert client.messages.count_tokens(model="tiny", messages=messages).input_tokens > 20
    with ollama.Client(host=served.http, timeout=60, trust_env=False) as local:
        parts = list(local.chat(model="tiny:latest", messages=messages, options=greedy, stream=True))
        assert "".join(part.message.content or "" for part in parts) == expected["chat"]
        told = local.generate(model="tiny", prompt=STORY, raw=True, options=greedy)
        assert told.response == expected["story"]
        assert told.eval_duration
        shape = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
        closed = {**shape, "additionalProperties": False}  # or a sampled answer may not come to its end
        answer = local.chat(model="tiny", messages=messages, format=closed)
        assert json.loads(answer.message.content or "")["city"] == "Paris"
    body = json.dumps({"prompt": STORY, "n_predict": 24, "temperature": 0}).encode()
    with urllib.request.urlopen(f"{served.http}/completion", body, timeout=60) as response:
        assert json.load(response)["content"] == expected["story"]


def test_grpc_streams_the_same_text(served: Served, expected: dict[str, Any]) -> None:
    request = inference_pb2.GenerateRequest(
        text=STORY, sampling=inference_pb2.SamplingOptions(max_tokens=24, temperature=0.0)
    )
    with grpc.insecure_channel(served.grpc) as channel:
        replies = list(stub(channel).Generate(request, timeout=60))
    assert "".join(reply.text for reply in replies) == expected["story"]
    assert replies[-1].usage.completion_tokens == 24


def test_a_required_call_has_arguments_that_follow_their_schema(served: Served) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "days", "unit"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "description": "Forecast for a city", "parameters": parameters}
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "How is the weather in Paris tomorrow?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    with sdk(served) as client:
        (choice,) = client.chat.completions.create(**request).choices
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason, choice.message.content) == ("get_weather", "tool_calls", None)
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days", "unit"}
    assert isinstance(arguments["city"], str)
    assert 1 <= arguments["days"] <= 7
    assert arguments["unit"] in ("celsius", "fahrenheit")
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert len(parts) > 3


def test_node_streams_the_same_text(served: Served, expected: dict[str, Any], node_folder: Path) -> None:
    command = [*node_client(node_folder), served.grpc, STORY, "24"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, expected["story"])


def test_generate_attaches_and_prints_the_result_as_its_last_line(
    served: Served, expected: dict[str, Any], model: Path
) -> None:
    words = ["--attach", str(served.run_dir), "--prompt", STORY, "--max-tokens", "24", "--temperature", "0", "--json"]
    run = run_allspan("generate", *words)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["text"] == expected["story"]
    assert result["prompt_tokens"] == len(load_tokenizer(model).encode(STORY))
    assert len(result["token_ids"]) == 24
    assert result["timings"]["ttft_s"] > 0


def test_a_running_server_is_found_without_its_run_directory(
    served: Served, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = str(served.run_dir)
    clusters = json.loads(run_allspan("ps", "--json", XDG_RUNTIME_DIR=str(served.runtime)).stdout)
    (shown,) = [cluster for cluster in clusters if cluster["run_dir"] == run_dir]
    found = [shown[name] for name in ("name", "pid", "state", "http", "grpc", "num_ranks")]
    assert found == ["tiny", served.process.pid, "ready", served.http, served.grpc, 2]
    log = run_allspan("logs", run_dir, "--rank", "1", XDG_RUNTIME_DIR=str(served.runtime)).stdout
    assert set(re.findall(r"^\S+ [A-Z]+ \[(.*?)\]", log, re.MULTILINE)) == {"rank 1"}
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(served.runtime))
    for address in (served.http, f"grpc://{served.grpc}"):
        with ClientEngine(attach=address) as engine:
            assert engine.generate(STORY, GREEDY)[0].text == expected["story"]


def test_chat_reads_lines_and_streams_replies(served: Served, expected: dict[str, Any]) -> None:
    words = ["-m", "allspan.launch.cli", "chat", "--attach", str(served.run_dir), "--temperature=0", "--max-tokens=24"]
    run = subprocess.run(
        [served.process.args[0], *words],  # type: ignore[index]
        input=f"{QUESTION}\n\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == expected["chat"].strip()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"temperature": "NaN"}, ["temperature"]),
        ({"prompt": [999999]}, ["999999"]),
        ({"prompt": list(range(600))}, ["600", "512"]),
        ({"model": "other"}, ["other", "tiny"]),
    ],
)
def test_bad_input_is_refused_by_name_and_the_server_goes_on(
    served: Served, expected: dict[str, Any], fields: dict[str, Any], words: list[str]
) -> None:
    def ask(**changes: Any) -> Any:
        body = {"model": "tiny", "prompt": STORY, "max_tokens": 24, "temperature": 0} | changes
        text = json.dumps(body).replace('"NaN"', "NaN").encode()
        request = urllib.request.Request(f"{served.http}/v1/completions", text, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(**fields)
    with caught.value as answer:
        assert answer.code in (400, 404)
        message = json.load(answer)["error"]["message"]
    assert all(word in message for word in words), message
    assert ask()["choices"][0]["text"] == expected["story"]


def test_bad_input_to_the_facade_is_refused_by_name(served: Served) -> None:
    with ClientEngine(attach=served.run_dir) as engine:
        for prompt, word in (([999999], "999999"), (list(range(600)), "600"), ([], "prompt")):
            with pytest.raises(InvalidRequest, match=word):
                engine.generate([prompt], GREEDY)
        assert len(engine.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 24
