"""Every sampling field and request option reaches the engine, by HTTP and by gRPC; and what they ask for comes back."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

import grpc
import pytest

from allspan.client.gateway.admission.bad_words import bad_words_ids
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import DeadlineExceeded, QueueFull
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SamplingParams
from support.chat_tokenizer import chat_tokenizer
from support.gateway import events, eventually, fake_engine, gateway, stub

SAMPLING: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.5,
    "do_sample": False,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.8,
    "seed": 11,
    "stop": ("zz",),
    "stop_token_ids": (5,),
    "stop_words_ids": ((1, 2), (3,)),
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "suppress_repetition_in_generation": True,
    "no_repeat_ngram_size": 4,
    "logit_bias": ((4, -2.5), (6, 100.0)),
    "allowed_token_ids": (4, 6, 84),
    "bad_words_ids": ((7, 8), (9,)),
}
OPTIONS: dict[str, Any] = {
    "priority": -3,
    "timeout_s": 7.5,
    "prefix_cache": False,
    "cache_salt": "tenant",
    "speculation": False,
}


def test_nothing_is_left_out_here() -> None:
    assert SAMPLING.keys() | {"grammar"} == {field.name for field in fields(SamplingParams)}
    assert OPTIONS.keys() | {"pooling", "adapter"} == {field.name for field in fields(RequestOptions)}


async def test_every_field_is_reachable_over_http() -> None:
    body = SAMPLING | OPTIONS | {"logit_bias": {"6": 100, "4": -2.5}}
    async with gateway() as server:
        answer = await server.post("/v1/completions", prompt="x", **body)
        assert answer.status_code == 200, answer.text
        completion = server.engine.last
        chat = body | {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3}
        answer = await server.post("/v1/chat/completions", **chat)
        assert answer.status_code == 200, answer.text
        answered = server.engine.last
    for asked in (completion, answered):
        assert asked.params == SamplingParams(**SAMPLING)
        assert asked.options == RequestOptions(**OPTIONS)


async def test_every_field_is_reachable_over_grpc() -> None:
    given = SAMPLING | {"logit_bias": dict(SAMPLING["logit_bias"])}
    for name in ("bad_words_ids", "stop_words_ids"):
        given[name] = [pb.TokenIds(ids=ids) for ids in SAMPLING[name]]
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(**given), **OPTIONS)
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        await stub(channel).Generate(request, timeout=10).read()
        asked = server.engine.last
        await stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=10).read()
        default = server.engine.last
    assert asked.params == SamplingParams(**SAMPLING)
    assert asked.options == RequestOptions(**OPTIONS)
    assert default.params == SamplingParams(max_tokens=255)
    assert default.options.timeout_s is not None  # the call's deadline
    assert replace(default.options, timeout_s=None) == RequestOptions()


async def test_bad_words_are_refused_at_the_start_and_after_a_space() -> None:
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        await server.post("/v1/completions", prompt="x", bad_words=["ab", " ab", "c d"], bad_words_ids=[[7]])
        over_http = server.engine.last.params.bad_words_ids
        sampling = pb.SamplingOptions(bad_words=["ab", "c d"], bad_words_ids=[pb.TokenIds(ids=[7])])
        await stub(channel).Generate(pb.GenerateRequest(text="x", sampling=sampling), timeout=10).read()
        over_grpc = server.engine.last.params.bad_words_ids
    assert over_http == over_grpc == ((7,), (97, 98), (32, 97, 98), (99, 32, 100), (32, 99, 32, 100))
    assert bad_words_ids(chat_tokenizer(), ()) == ()


async def test_prompt_logprobs_come_in_the_shape_of_vllm() -> None:
    """Null for the first token; the prompt's own token first, with its rank if it is among the likeliest."""
    async with gateway() as server:
        body = {"prompt": "abcd", "max_tokens": 2, "n": 2, "prompt_logprobs": 2}
        whole = (await server.post("/v1/completions", **body)).json()
        messages = [{"role": "user", "content": "b"}]
        chat = (await server.post("/v1/chat/completions", messages=messages, prompt_logprobs=0, max_tokens=1)).json()
        plain = (await server.post("/v1/completions", prompt="abcd")).json()
    assert [choice["prompt_logprobs"] for choice in whole["choices"]] == [whole["choices"][0]["prompt_logprobs"]] * 2
    first, second, *rest = whole["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        "99": {"logprob": 0.0, "rank": 1, "decoded_token": "c"},
    }
    assert [next(iter(place)) for place in rest] == ["99", "100"]
    assert chat["prompt_logprobs"] == [
        None,
        {"98": {"logprob": pytest.approx(-9.8), "rank": None, "decoded_token": "b"}},
        {"259": {"logprob": pytest.approx(-25.9), "rank": None, "decoded_token": "<|assistant|>"}},
    ]
    assert "prompt_logprobs" not in plain["choices"][0]


async def test_grpc_gives_prompt_logprobs_once_and_every_choice_its_own_end() -> None:
    options = pb.SamplingOptions(max_tokens=3, prompt_logprobs=1, seed=2**64 - 1)
    request = pb.GenerateRequest(text="abcde", n=3, sampling=options)
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        responses = [response async for response in stub(channel).Generate(request, timeout=10)]
        seeds = sorted(asked.params.seed for asked in server.engine.asked.values())  # type: ignore[type-var]
    assert seeds == [0, 1, 2**64 - 1]
    for index in range(3):
        mine = [response for response in responses if response.index == index]
        entries = [entry for response in mine for entry in response.prompt_logprobs]
        assert bytes(entry.chosen.token_id for entry in entries) == b"bcde"
        assert [top.token_id for top in entries[0].top] == [99]
        assert "".join(response.text for response in mine) == "The"
        assert [response.finish_reason for response in mine][-1] == "length"
        assert (mine[-1].usage.prompt_tokens, mine[-1].usage.completion_tokens) == (5, 3)


async def test_cached_tokens_are_told_with_the_usage() -> None:
    async with gateway() as server:
        whole = (await server.post("/v1/completions", prompt="abcd", n=2)).json()
        body = {"prompt": "abcd", "stream": True, "stream_options": {"include_usage": True}}
        streamed = events((await server.post("/v1/completions", **body)).text)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert streamed[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with gateway(fake_engine(refusal=QueueFull("7 wait, at most 7"))) as server:
        response = await server.post("/v1/completions", prompt="x")
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=10).read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata())["retry-after"] == "1"


async def test_a_request_that_runs_out_of_its_time_is_told_so() -> None:
    async with gateway(fake_engine(fail_after=2, failure=DeadlineExceeded("timeout_s (0.1 s) ran out"))) as server:
        response = await server.post("/v1/completions", prompt="x", timeout_s=0.1)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            call = stub(channel).Generate(pb.GenerateRequest(text="x", timeout_s=0.1), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [response async for response in call]
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_draining_tells_how_many_are_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "allspan.gateway")
    monkeypatch.setattr("allspan.client.gateway.admission.admission.DRAIN_LOG_S", 0.05)
    async with gateway(fake_engine(endless=True, step_s=0.005)) as server:
        running = asyncio.create_task(server.post("/v1/completions", prompt="x", n=2, max_tokens=100))
        await eventually(lambda: len(server.engine.asked) == 2)
        server.stop.set()
        assert (await running).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "draining" in record.getMessage()]
    assert len(lines) > 1
    assert all(line.startswith("draining: 2 requests still run, ") for line in lines)
