"""Chat completions as the OpenAI SDK and a plain HTTP client see them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from support.chat_tokenizer import VOCAB_SIZE, chat_tokenizer
from support.fake_engine import ANSWER
from support.gateway import Gateway, events, fake_engine, gateway

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def sdk(server: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="none", max_retries=0)


async def test_sdk_reads_a_whole_answer() -> None:
    async with gateway() as server, sdk(server) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4  # <|user|> H i <|assistant|>
    assert answer.usage.completion_tokens == len(ANSWER.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_sdk_reads_a_stream_that_adds_up_to_the_whole_answer() -> None:
    async with gateway() as server, sdk(server) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER.encode()) + 1
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_ends_with_done_and_never_cuts_a_character() -> None:
    async with gateway() as server:
        response = await server.post("/v1/chat/completions", model="tiny", messages=MESSAGES, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    payloads = events(response.text)
    assert payloads[-1] == "[DONE]"
    assert all("usage" not in payload for payload in payloads[:-1])
    assert "\ufffd" not in response.text


async def test_several_choices_come_interleaved_and_differ_in_seed_only() -> None:
    async with gateway(fake_engine(step_s=0.001)) as server, sdk(server) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=7, stream=True)
        order: list[int] = []
        texts = ["", "", ""]
        async for chunk in stream:
            order.append(chunk.choices[0].index)
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        seeds = sorted(asked.params.seed or 0 for asked in server.engine.asked.values())
    assert texts == [ANSWER] * 3
    assert seeds == [7, 8, 9]
    assert sum(a != b for a, b in pairwise(order)) > 10


async def test_usage_counts_a_prompt_with_several_choices_once() -> None:
    async with gateway() as server:
        answer = (await server.post("/v1/chat/completions", messages=MESSAGES, n=2, max_tokens=5)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_the_text_and_stops_the_engine(stream: bool) -> None:
    engine = fake_engine(step_s=0.002, endless=True)
    async with gateway(engine) as server:
        body = {"messages": MESSAGES, "stop": ["brown", "zebra"], "stream": stream}
        response = await server.post("/v1/chat/completions", **body)
        if stream:
            choices = [payload["choices"][0] for payload in events(response.text)[:-1]]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            reason = choices[-1]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("The quick ", "stop")
    assert engine.last.stopped
    assert engine.last.steps <= len("The quick brown") + 2


async def test_length_is_the_reason_when_max_tokens_runs_out() -> None:
    async with gateway() as server, sdk(server) as client:
        for extra in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
            answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, **extra)  # type: ignore[call-overload]
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The", "length")


async def test_max_tokens_is_the_rest_of_the_context_unless_given() -> None:
    async with gateway(fake_engine(max_model_len=32)) as server:
        answer = (await server.post("/v1/chat/completions", messages=MESSAGES)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert server.engine.last.params.max_tokens == 32 - 4


async def test_logprobs_have_tokens_bytes_and_the_likeliest() -> None:
    async with gateway() as server, sdk(server) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first = logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("T", [ord("T")], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("T", -0.5), ("U", -1.5)]


async def test_template_sees_the_roles_and_parts() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with gateway() as server:
        await server.post("/v1/chat/completions", messages=messages, max_tokens=1)
        prompt = server.engine.last.prompt
    assert chat_tokenizer().decode(prompt, skip_special_tokens=False) == "<|system|>be brief<|user|>ab<|assistant|>"


async def test_base_model_without_a_template_says_so() -> None:
    async with gateway(tokenizer=chat_tokenizer(template=None)) as server, sdk(server) as client:
        with pytest.raises(BadRequestError, match="no chat template") as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert caught.value.param == "messages"
        assert (await server.post("/v1/completions", prompt="x")).status_code == 200


async def test_chat_template_of_the_settings_wins() -> None:
    async with gateway(chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}") as server:
        await server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1)
        assert bytes(server.engine.last.prompt) == b"[Hi]"


async def test_unknown_model_is_the_sdks_not_found() -> None:
    async with gateway() as server, sdk(server) as client:
        with pytest.raises(NotFoundError, match="tiny"):
            await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).model_dump()["max_model_len"] == 256


async def test_failure_in_mid_stream_is_an_error_event_then_the_end() -> None:
    async with gateway(fake_engine(fail_after=5)) as server, sdk(server) as client:
        response = await server.post("/v1/chat/completions", messages=MESSAGES, stream=True)
        last = events(response.text)[-1]
        assert last["error"]["message"] == "rank 1 (pid 7 on here) died: signal 9"
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "unavailable")
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(APIError, match="rank 1"):
            async for _ in stream:
                pass
        response = await server.post("/v1/chat/completions", messages=MESSAGES)
        assert response.status_code == 503
        assert "rank 1" in response.json()["error"]["message"]


async def test_ids_of_the_vocabulary_without_text_do_no_harm() -> None:
    async with gateway(fake_engine(tokens=(72, VOCAB_SIZE + 5, 105), vocab_size=VOCAB_SIZE + 64)) as server:
        answer = (await server.post("/v1/chat/completions", messages=MESSAGES)).json()
    assert answer["choices"][0]["message"]["content"] == "Hi"
