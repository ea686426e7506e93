"""The public gRPC service of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from allspan.client.transport.public import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, Access, Message, Piece, Pieces
from allspan.protos import inference_pb2 as pb
from allspan.protos import inference_pb2_grpc
from allspan.protos.api.errors import ERRORS, AllspanError, ConfigError, Unavailable, from_code, from_grpc

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids")


class GrpcServer:
    """A server at HOST:PORT, with TLS where files for it are given or `with_tls` asks for it."""

    def __init__(self, address: str, access: Access, with_tls: bool = False, model: str = "") -> None:
        """Asks for the model's name; requests go to `model` instead if it is given. Unavailable when nobody answers,
        ConfigError for files that cannot be read."""
        self._address = address
        self._metadata = [("authorization", f"Bearer {access.key}")] if access.key else []
        self._channel = _channel(address, access, with_tls)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            info = self._stub.ServerInfo(
                pb.ServerInfoRequest(), timeout=CONNECT_TIMEOUT_S, metadata=self._metadata, wait_for_ready=False
            )
        except grpc.RpcError as error:
            self._channel.close()
            raise _translated(error, address) from None
        self._model = model or str(info.model.id)

    @property
    def model(self) -> str:
        return self._model

    def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Pieces:
        listed = [pb.Message(role=message["role"], content=message["content"]) for message in messages]
        return self._stream(pb.GenerateRequest(model=self._model, chat=pb.Messages(messages=listed)), fields)

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Pieces:
        return self._stream(pb.GenerateRequest(model=self._model, text=prompt), fields)

    def close(self) -> None:
        self._channel.close()

    def _stream(self, request: pb.GenerateRequest, fields: Mapping[str, Any]) -> Pieces:
        for name, value in fields.items():
            if name in _LISTS:
                getattr(request.sampling, name).extend(value)
            else:
                setattr(request.sampling, name, value)
        call = self._stub.Generate(request, metadata=self._metadata, timeout=ANSWER_TIMEOUT_S)
        try:
            for response in call:
                yield Piece(
                    response.text,
                    tuple(response.token_ids),
                    response.finish_reason,
                    response.usage.prompt_tokens,  # 0 before the last
                    response.usage.completion_tokens,
                )
        except grpc.RpcError as error:
            raise _translated(error, self._address) from None
        finally:
            call.cancel()


def _channel(address: str, access: Access, with_tls: bool) -> grpc.Channel:
    tls = access.tls
    if not (with_tls or tls.is_given):
        return grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
    try:
        parts = [_read(path) for path in (tls.ca_certs, tls.keyfile or tls.certfile, tls.certfile)]
    except OSError as error:
        raise ConfigError(f"the files for TLS cannot be read: {error}") from None
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*parts), options=[("grpc.enable_http_proxy", 0)])


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


def _translated(error: Any, address: str) -> AllspanError:
    details = " ".join((error.details() or "no details").split())
    code = dict(error.trailing_metadata() or ()).get("allspan-error-code")
    if code in ERRORS:
        return from_code(str(code), details)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"no gRPC server answers at {address}: {details}")
    return from_grpc(error.code().name, details)
