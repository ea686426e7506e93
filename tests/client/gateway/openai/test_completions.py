"""Plain completions: every form of prompt, and the shapes of the older endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from support.fake_engine import ANSWER
from support.gateway import events, fake_engine, gateway


async def test_sdk_reads_whole_and_streamed_completions() -> None:
    async with gateway() as server, AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="none") as client:
        answer = await client.completions.create(model="tiny", prompt="Hi", max_tokens=100)
        stream = await client.completions.create(model="tiny", prompt="Hi", max_tokens=100, stream=True)
        chunks = [chunk async for chunk in stream]
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        ANSWER,
        "stop",
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]


async def test_max_tokens_is_16_unless_given() -> None:
    async with gateway() as server:
        answer = (await server.post("/v1/completions", prompt="Hi")).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (ANSWER[:16], "length")
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
async def test_prompts_come_as_text_or_ids_one_or_many(prompt: Any, seen: list[bytes]) -> None:
    async with gateway() as server:
        answer = (await server.post("/v1/completions", prompt=prompt, max_tokens=3, n=2)).json()
        asked = [bytes(asked.prompt) for asked in server.engine.asked.values()]
    assert asked == [prompt for prompt in seen for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(seen)))
    assert all(choice["text"] == "The" for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, seen))


async def test_logprobs_have_the_older_shape() -> None:
    async with gateway() as server:
        answer = (await server.post("/v1/completions", prompt="x", max_tokens=3, logprobs=1)).json()
        streamed = await server.post("/v1/completions", prompt="x", max_tokens=3, logprobs=1, stream=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["T", "h", "e"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"T": -0.5}, {"h": -0.5}, {"e": -0.5}],
        "text_offset": [0, 1, 2],
    }
    pieces = [payload["choices"][0]["logprobs"] for payload in events(streamed.text)[:-1]]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == [0, 1, 2]


async def test_sampling_fields_reach_the_engine_and_defaults_fill_the_rest() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1, "min_tokens": 2, "max_tokens": 9}
    async with gateway() as server:
        await server.post("/v1/completions", prompt="x", stop_token_ids=[5], ignore_eos=True, stop="zz", **fields)
        given = server.engine.last.params
        await server.post("/v1/completions", prompt="x", temperature=None, user="me", presence_penalty=0)
        default = server.engine.last.params
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.5, 0.9, 7, 0.1)
    assert (given.seed, given.min_tokens, given.max_tokens) == (2**64 - 1, 2, 9)
    assert (given.stop_token_ids, given.ignore_eos, given.stop) == ((5,), True, ("zz",))
    assert (default.temperature, default.top_p, default.top_k, default.seed) == (1.0, 1.0, 0, None)


async def test_a_request_that_sets_nothing_gets_the_defaults_that_the_models_route_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "allspan.gateway")
    override = '{"temperature": 0.3, "max_new_tokens": 40}'
    async with gateway(generation_config="auto", override_generation_config=override) as server:
        card = (await server.http.get("/v1/models")).json()["data"][0]
        asked = []
        for route, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("completions", {"prompt": "x"}),
            ("completions", {"prompt": "x", "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 99}),
        ):
            await server.post(f"/v1/{route}", **body)
            asked.append(server.engine.last.params)
    told = card["sampling_defaults"]
    assert (told["temperature"], told["top_k"], told["top_p"], told["min_p"]) == (0.3, 40, 0.95, 0.05)
    assert (told["repetition_penalty"], told["presence_penalty"], told["max_tokens"]) == (1.0, 0.0, 40)
    assert "llama-server" in card["sampling_defaults_source"]
    assert "override-generation-config" in card["sampling_defaults_source"]
    assert {name: getattr(asked[0], name) for name in told} == told
    assert {name: getattr(asked[1], name) for name in told} == told | {"max_tokens": 16}
    given = (asked[2].temperature, asked[2].top_k, asked[2].top_p, asked[2].min_p, asked[2].max_tokens)
    assert given == (0, 0, 1, 0, 99)
    (line,) = [each.getMessage() for each in caplog.records if "no sampling fields" in each.getMessage()]
    assert "temperature 0.3, top_k 40, top_p 0.95, min_p 0.05" in line


async def test_models_list_and_request_id() -> None:
    async with gateway(served_model_name=("my/model", "gpt-4o")) as server:
        card, other = (await server.http.get("/v1/models")).json()["data"]
        assert other == card | {"id": "gpt-4o"}
        assert (await server.post("/v1/completions", model="GPT-4o", prompt="x")).json()["model"] == "my/model"
        assert (card["id"], card["object"], card["max_model_len"]) == ("my/model", "model", 256)
        assert (await server.http.get("/v1/models/my/model")).json() == card
        assert (await server.http.get("/v1/models/other")).status_code == 404
        echoed = await server.http.get("/health", headers={"X-Request-Id": "abc-1"})
        made_up = await server.http.get("/health", headers={"X-Request-Id": "a b\tc"})
    assert echoed.headers["x-request-id"] == "abc-1"
    assert len(made_up.headers["x-request-id"]) == 32


async def test_one_log_line_tells_how_each_request_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "allspan.gateway")
    async with gateway(fake_engine(step_s=0.001)) as server:
        await server.post("/v1/completions", prompt="abc", max_tokens=5)
        await server.post("/v1/completions", prompt="abc", max_tokens=0)
    lines = [record.getMessage() for record in caplog.records]
    (ended,) = [line for line in lines if line.startswith("finished")]
    assert "prompt 3 tokens (2 cached), output 5, queue 0.000 s, ttft 0." in ended
    assert "model tiny, request id " in ended
    assert ended.endswith("reason length")
    (refused,) = [line for line in lines if line.startswith("refused")]
    limit = "max_tokens is 0, must be from 1 to 2147483647"
    assert refused.startswith(f"refused POST /v1/completions with 400: {limit}, request id ")
