"""A client of `vllm.grpc.engine.VllmEngine`, as a router is one."""

from __future__ import annotations

from typing import Any

import grpc

from allspan.protos import vllm_worker_pb2 as pb

SERVICE = "vllm.grpc.engine.VllmEngine"


class WorkerClient:
    """`client.GetModelInfo(pb.GetModelInfoRequest())` and so on, on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for name, method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name.items():
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = kind(
                f"/{SERVICE}/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def tokenized(ids: list[int], **fields: Any) -> pb.GenerateRequest:
    """A request; `fields` are those of its sampling parameters, and request_id, stream."""
    own = {name: fields.pop(name) for name in ("request_id", "stream") if name in fields}
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=pb.SamplingParams(**fields), **own
    )
