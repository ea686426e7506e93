"""The public gRPC service as grpcio's own client sees it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import QueueFull, Unavailable
from support.chat_tokenizer import VOCAB_SIZE
from support.fake_engine import ANSWER
from support.gateway import Gateway, fake_engine, gateway, stub

SERVICE = "allspan.v1.Inference"
MAX_BYTES = 1 << 20
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt is missing: set one of text, token_ids, chat"),
    ({"text": ""}, "text is empty"),
    ({"text": "x" * 300}, "text has 300 tokens, at most 255"),
    ({"token_ids": pb.TokenIds(ids=[1, VOCAB_SIZE])}, f"token_ids[1] is token id {VOCAB_SIZE}, must be from 0 to"),
    ({"token_ids": pb.TokenIds()}, "token_ids is empty"),
    ({"chat": pb.Messages()}, "chat.messages has 0 entries"),
    ({"chat": pb.Messages(messages=[pb.Message(role="imp", content="x")])}, "chat.messages[0].role is 'imp'"),
    ({"text": "x", "request_id": "y" * 129}, "(129 characters), must be 1 to 128 printable ASCII characters"),
    ({"text": "x", "request_id": "mein Name"}, "request_id is 'mein Name'"),
    ({"text": "x", "n": 2**31}, "n is 2147483648, must be at most 8"),
    ({"text": "x", "timeout_s": -1}, "timeout_s is -1"),
    ({"text": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
    ({"text": "x", "sampling": pb.SamplingOptions(max_tokens=0)}, "max_tokens is 0, must be from 1"),
    ({"text": "x", "sampling": pb.SamplingOptions(max_tokens=256)}, "max_tokens is 256"),
    ({"text": "x", "sampling": pb.SamplingOptions(temperature=float("nan"))}, "temperature is nan"),
    ({"text": "x", "sampling": pb.SamplingOptions(top_p=0)}, "top_p is 0"),
    ({"text": "x", "sampling": pb.SamplingOptions(top_k=-7)}, "top_k is -7"),
    ({"text": "x", "sampling": pb.SamplingOptions(logprobs=21)}, "logprobs is 21, must be from 0 to 20"),
    ({"text": "x", "sampling": pb.SamplingOptions(stop=[""])}, "stop[0] is ''"),
    ({"text": "x", "sampling": pb.SamplingOptions(stop_token_ids=[VOCAB_SIZE])}, "stop_token_ids[0]"),
]


async def generate(server: Gateway, timeout: float = 10, **fields: Any) -> list[pb.GenerateResponse]:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = stub(channel).Generate(pb.GenerateRequest(**fields), timeout=timeout)
        return [response async for response in call]


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ({"text": "Hi"}, [72, 105]),
        ({"token_ids": pb.TokenIds(ids=[72, 105])}, [72, 105]),
        ({"chat": pb.Messages(messages=[pb.Message(role="user", content="Hi")])}, [258, 72, 105, 259]),
    ],
)
async def test_text_ids_and_chat_stream_the_same_answer(prompt: dict[str, Any], seen: list[int]) -> None:
    async with gateway() as server:
        responses = await generate(server, request_id="mine", model="tiny", **prompt)
        assert list(server.engine.last.prompt) == seen
    assert "".join(response.text for response in responses) == ANSWER
    assert all("\ufffd" not in response.text for response in responses)
    assert {response.request_id for response in responses} == {"mine"}
    assert [response.finish_reason for response in responses][-2:] == ["", "stop"]
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (len(seen), 2)
    assert usage.completion_tokens == len(ANSWER.encode()) + 1


async def test_sampling_options_reach_the_engine() -> None:
    options = pb.SamplingOptions(max_tokens=4, temperature=0, top_k=3, seed=2**64 - 1, stop=["quick"], logprobs=1)
    async with gateway() as server:
        responses = await generate(server, text="x", sampling=options)
        params = server.engine.last.params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (4, 0, 3, 2**64 - 1)
    assert (params.stop, params.logprobs, params.top_p) == (("quick",), 1, 1.0)
    logprobs = [entry for response in responses for entry in response.logprobs]
    assert [entry.chosen.token_id for entry in logprobs] == list(ANSWER.encode()[:4])
    assert [(top.token_id, top.logprob) for top in logprobs[0].top] == [(ord("T"), -0.5)]


async def test_bad_requests_are_invalid_arguments_that_name_the_field() -> None:
    async with gateway() as server:
        for fields, words in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(server, **fields)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert words in (caught.value.details() or "")
            trailers = dict(caught.value.trailing_metadata())
            assert trailers["allspan-error-code"] == "invalid_request"
        assert not server.engine.asked
        assert await generate(server, text="x")


@pytest.mark.parametrize(
    ("script", "fields", "code", "words"),
    [
        ({}, {"model": "gpt-9"}, grpc.StatusCode.NOT_FOUND, "'gpt-9' is not served here"),
        ({"refusal": QueueFull("1024 wait, at most 1024")}, {}, grpc.StatusCode.RESOURCE_EXHAUSTED, "at most 1024"),
        ({"refusal": Unavailable("rank 1 died")}, {}, grpc.StatusCode.UNAVAILABLE, "rank 1 died"),
        ({"fail_after": 3}, {}, grpc.StatusCode.UNAVAILABLE, "rank 1 (pid 7 on here)"),
        ({"refusal": ZeroDivisionError("secret")}, {}, grpc.StatusCode.INTERNAL, "incident-"),
    ],
)
async def test_errors_have_the_status_of_the_table(
    script: dict[str, Any], fields: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    async with gateway(fake_engine(**script)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(server, text="x", **fields)
    assert caught.value.code() == code
    assert words in (caught.value.details() or "")
    assert "secret" not in (caught.value.details() or "")


async def test_bytes_that_are_no_message_and_messages_too_large() -> None:
    async with (
        gateway(grpc_max_message_bytes=MAX_BYTES) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        raw = channel.unary_stream(f"/{SERVICE}/Generate")
        for data, code in (
            (b"\x0a\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            (b"\x12\x02\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),  # text that is no UTF-8
            (b" " * (MAX_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(data, timeout=10).read()
            assert caught.value.code() == code, caught.value.details()
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                assert str(MAX_BYTES) in (caught.value.details() or "")
        assert await generate(server, text="x")


async def test_list_models() -> None:
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        models = await stub(channel).ListModels(pb.ListModelsRequest(), timeout=5)
    assert [(model.id, model.max_model_len) for model in models.models] == [("tiny", 256)]


async def test_health_and_ready_follow_the_engine() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        requests = [health_pb2.HealthCheckRequest(service=service) for service in ("", SERVICE)]
        watches = [health.Watch(request, timeout=20) for request in requests]
        assert [(await watch.read()).status for watch in watches] == [serving] * 2
        assert (await server.http.get("/ready")).json() == {"status": "ready"}

        server.engine.down_cause = "rank 1 died: signal 9"
        assert [(await health.Check(request)).status for request in requests] == [not_serving] * 2
        assert [(await watch.read()).status for watch in watches] == [not_serving] * 2
        ready = await server.http.get("/ready")
        assert (ready.status_code, ready.json()["error"]["message"]) == (503, "rank 1 died: signal 9")
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.post("/v1/completions", prompt="x")).status_code == 503

        server.engine.down_cause = ""
        assert [(await watch.read()).status for watch in watches] == [serving] * 2
        assert (await server.http.get("/ready")).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="nothing"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_whoever_is_too_much_hears_it_from_the_queue_however_many_they_are() -> None:
    """gRPC's own limit on calls that wait for a handler would break some of these off as CANCELLED."""

    async def outcome(channel: grpc.aio.Channel) -> grpc.StatusCode:
        call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=60)
        with contextlib.suppress(grpc.aio.AioRpcError):
            assert [response async for response in call]
        return await call.code()

    async with (
        gateway(fake_engine(), max_concurrent_requests=1) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        codes = set(await asyncio.gather(*(outcome(channel) for _ in range(2500))))
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
