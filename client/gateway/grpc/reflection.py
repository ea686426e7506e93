"""Server reflection, by which grpcurl and its like learn the services: v1, and v1alpha for older tools.

Both versions have the same messages but for the package's name, so that one servicer answers both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

ALPHA = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(
    server: grpc.aio.Server, files: Sequence[FileDescriptor], packages: Mapping[str, str] | None = None
) -> None:
    """Adds the reflection service, which lists all services of `files` and itself. `packages`: those that are shown
    under another name."""
    pool = descriptor_pool.DescriptorPool()
    names = []
    for file in files:
        shown = (packages or {}).get(file.package, file.package)
        names += [f"{shown}.{service}" for service in file.services_by_name]
        if shown == file.package:
            _add(pool, file)
        else:
            pool.Add(_renamed(file, file.name, shown))
    _add(pool, reflection_pb2.DESCRIPTOR)
    pool.Add(_renamed(reflection_pb2.DESCRIPTOR, "grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"))
    servicer = reflection.aio.ReflectionServicer((*names, ALPHA, V1), pool)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers) for name in (ALPHA, V1)])


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor) -> None:
    for dependency in file.dependencies:
        _add(pool, dependency)
    pool.AddSerializedFile(file.serialized_pb)


def _renamed(source: FileDescriptor, name: str, package: str) -> descriptor_pb2.FileDescriptorProto:
    """Returns a file without imports under another name and in another package."""
    file = descriptor_pb2.FileDescriptorProto.FromString(source.serialized_pb)
    before, after = f".{file.package}.", f".{package}."
    file.name, file.package = name, package
    messages = list(file.message_type)
    for message in messages:  # grows
        messages += message.nested_type
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(before, after)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(before, after)
            method.output_type = method.output_type.replace(before, after)
    return file
