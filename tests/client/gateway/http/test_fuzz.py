"""Nonsense in every field: an answer or a refusal, never a server error, and nothing left running."""

from __future__ import annotations

import contextlib
import random

import grpc
import pytest

from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.extra_fields import NEVER
from allspan.client.gateway.openai.schemas import CompletionRequest
from allspan.protos import inference_pb2 as pb
from support.gateway import eventually, fake_engine, gateway, stub

HUGE = "9" * 5000
VALUES = [
    *("null", "true", "0", "-1", "1", "1.5", "1e999", "NaN", "-Infinity", HUGE, f"-{HUGE}", "18446744073709551616"),
    *('""', '"a"', r'"\u0000"', r'"\ud800"', r'"\ud83e\udd8a"', f'"{"s" * 5000}"'),
    *("[]", "[1]", '["a"]', "[[1],[2]]", f"[{HUGE}]", f"[[{HUGE}]]", '["",null]', "[-1]", "[[[[[[]]]]]]"),
    *("{}", '{"a":1}', '{"type":"text"}', '{"include_usage":true}', f'{{"include_usage":{HUGE}}}', f'{{"{HUGE}":1}}'),
    *('[{"role":["user"],"content":"x"}]', '[{"role":{},"content":[{"type":[],"text":1}]}]', f'[{{"content":{HUGE}}}]'),
    f'[{{"role":"user","content":"x","name":{HUGE}}}]',
]


@pytest.mark.parametrize(
    ("path", "good", "model"),
    [
        ("/v1/completions", ("prompt", '"x"'), CompletionRequest),
        ("/v1/chat/completions", ("messages", '[{"role":"user","content":"x"}]'), ChatRequest),
    ],
)
async def test_any_json_in_any_field(path: str, good: tuple[str, str], model: type[ChatRequest]) -> None:
    fields = [*model.model_fields, *NEVER, "user", "unheard_of"]
    chosen = random.Random(7)
    async with gateway(fake_engine(max_model_len=64)) as server:
        for _ in range(400):
            body = dict([good]) | {
                field: chosen.choice(VALUES) for field in chosen.sample(fields, chosen.randint(1, 3))
            }
            text = "{" + ",".join(f'"{name}":{value}' for name, value in body.items()) + "}"
            response = await server.http.post(path, content=text.encode(), headers={"Content-Type": "application/json"})
            assert response.status_code < 500, (text[:300], response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                assert len(response.text) < 800
        await eventually(lambda: all(asked.released for asked in server.engine.asked.values()))


async def test_any_bytes_as_a_message() -> None:
    chosen = random.Random(7)
    sampling = pb.SamplingOptions(max_tokens=3, temperature=1, top_k=2, top_p=0.5, seed=1, stop=["a"], logprobs=1)
    good = pb.GenerateRequest(text="x", sampling=sampling, request_id="r").SerializeToString()
    async with gateway(fake_engine(max_model_len=64)) as server:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            raw = channel.unary_stream("/allspan.v1.Inference/Generate")
            for _ in range(300):
                data = bytearray(good)
                for _ in range(chosen.randint(1, 4)):
                    data[chosen.randrange(len(data))] = chosen.randrange(256)
                call = raw(bytes(data[: chosen.randint(1, len(data))]), timeout=10)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                assert (await call.code()).name in ("OK", "INVALID_ARGUMENT", "NOT_FOUND"), data
            assert [response async for response in stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=5)]
        await eventually(lambda: all(asked.released for asked in server.engine.asked.values()))
