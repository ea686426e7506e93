"""The default model through `allspan serve`: what it answers under a schema is of that schema, as the SDK reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import grpc
import openai
import pytest
from pydantic import BaseModel

from allspan.protos import inference_pb2 as pb
from allspan.protos import inference_pb2_grpc
from support.default_model import default_model
from support.json_schemas import is_valid
from support.serving import Served, runtime_folder

pytestmark = pytest.mark.timeout(240)

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain", "Italy"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["name", "country", "population"],
    "additionalProperties": False,
}


class Step(BaseModel):
    """Of a solution."""

    explanation: str
    output: int


class Solution(BaseModel):
    """What `parse` makes of an answer."""

    kind: Literal["sum", "product"]
    steps: list[Step]
    answer: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with runtime_folder() as runtime:
        server = Served(default_model(), "--max-model-len=1024", "--max-num-seqs=8", runtime=runtime)
        try:
            yield server.wait_ready()
            assert server.ask_to_end() == 0
        finally:
            server.kill()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_of_the_schema(client: openai.OpenAI, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answers: Any = client.chat.completions.create(
        model=model_of(client),
        messages=ask("Describe the city of Paris as JSON."),
        response_format=form,
        max_tokens=200,
        temperature=0.7,
        seed=5,
        n=3,
        stream=stream,
    )
    texts, reasons = ["", "", ""], [""] * 3
    if stream:
        for chunk in answers:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    else:
        for choice in answers.choices:
            texts[choice.index], reasons[choice.index] = choice.message.content, choice.finish_reason
    assert reasons == ["stop"] * 3
    for text in texts:
        assert is_valid(CITY, json.loads(text)), text


def test_the_sdk_parses_an_answer_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=model_of(client),
        messages=ask("What is 2 + 3? Solve it in one short step."),
        response_format=Solution,
        max_tokens=400,
        temperature=0,
        extra_body={"repetition_penalty": 1.1},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Solution), choice.message.content


def test_the_other_kinds_through_completions(client: openai.OpenAI) -> None:
    def complete(prompt: str, **extra: Any) -> str:
        answer = client.completions.create(
            model=model_of(client), prompt=prompt, max_tokens=60, temperature=0.8, seed=1, extra_body=extra
        )
        return answer.choices[0].text

    assert complete("A good word is", guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"\d{4}-\d{2}", complete("Month:", structured_outputs={"regex": r"\d{4}-\d{2}"}))
    assert re.fullmatch(
        r"[0-9]( [+-] [0-9]){2}", complete("Sum:", guided_grammar='root ::= [0-9] ( " " [+-] " " [0-9]){2}')
    )


def test_a_dead_end_fails_that_request_alone(client: openai.OpenAI, served: Served) -> None:
    model = model_of(client)
    beside = client.completions.create(
        model=model, prompt="Once", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    next(beside)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model=model, prompt="x", extra_body={"guided_choice": ["yes"], "allowed_token_ids": [1]}
        )
    assert "no token" in caught.value.message
    assert [chunk.choices[0].finish_reason for chunk in beside][-1] == "length"
    assert served.process.poll() is None


def test_grpc_answers_under_a_schema(served: Served) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        sampling = pb.SamplingOptions(
            structured=pb.StructuredOutput(json_schema=json.dumps(CITY)), max_tokens=200, temperature=0
        )
        chat = pb.Messages(messages=[pb.Message(role="user", content="A city as JSON.")])
        responses = list(stub.Generate(pb.GenerateRequest(chat=chat, sampling=sampling), timeout=60))
    assert responses[-1].finish_reason == "stop"
    assert is_valid(CITY, json.loads("".join(response.text for response in responses)))
