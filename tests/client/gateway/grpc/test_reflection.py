"""Reflection as grpcurl uses it: list, find, and rebuild every type from what comes."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2 as pb

from support.gateway import gateway

INFERENCE, HEALTH = "allspan.v1.Inference", "grpc.health.v1.Health"
VERSIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@pytest.mark.parametrize("version", VERSIONS)
async def test_both_versions_list_and_describe_every_service(version: str) -> None:
    symbols = (INFERENCE, HEALTH, *VERSIONS, "no.such.Service")
    requests = [pb.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = channel.stream_stream(
            f"/{version}/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )(iter([pb.ServerReflectionRequest(list_services=""), *requests]), timeout=5)
        listed, *described = [response async for response in call]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {INFERENCE, HEALTH, *VERSIONS}
    *known, unknown = described
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    for symbol, response in zip(symbols, known, strict=False):
        pool = descriptor_pool.DescriptorPool()
        for data in response.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        methods = pool.FindServiceByName(symbol).methods
        assert methods
        assert all(method.input_type.fields is not None for method in methods)
        if symbol == INFERENCE:
            fields = pool.FindMessageTypeByName("allspan.v1.SamplingOptions").fields_by_name
            assert {"temperature", "logit_bias"} <= set(fields)
