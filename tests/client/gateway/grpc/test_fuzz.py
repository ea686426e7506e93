"""A short form of `support.grpc_fuzz`: messages made from descriptors, and broken ones, over a scripted engine."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError

from allspan.protos import inference_pb2 as pb
from support.gateway import eventually, fake_engine, gateway
from support.grpc_fuzz import METHODS, Fuzz, Run

CALLS = 800


async def test_any_message_is_answered_or_refused_and_leaves_nothing() -> None:
    async with gateway(fake_engine(max_model_len=64)) as server:
        run = Run(server.grpc_address, seed=1)
        await run.calls(CALLS)
        await eventually(lambda: all(asked.released for asked in server.engine.asked.values()))
    answered = {status for status in run.statuses if run.statuses[status]}
    assert {"Generate OK", "Generate INVALID_ARGUMENT", "Tokenize OK", "Detokenize INVALID_ARGUMENT"} <= answered


def test_every_method_and_field_is_fuzzed() -> None:
    assert set(METHODS) == set(pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name)
    fuzz, seen = Fuzz(3), set()
    for _ in range(400):
        message = pb.GenerateRequest()
        with contextlib.suppress(DecodeError):
            message.ParseFromString(fuzz.message(pb.GenerateRequest.DESCRIPTOR))
        seen |= {field.name for field, _ in message.ListFields()}
        seen |= {field.name for field, _ in message.sampling.ListFields()}
    assert seen == set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) | set(pb.SamplingOptions.DESCRIPTOR.fields_by_name)
