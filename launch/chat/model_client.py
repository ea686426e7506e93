"""What answers in `allspan chat` and `generate`: a cluster, or a server at a URL."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from allspan.client.engine import ClientEngine
from allspan.client.transport.public import Access, Message, Piece, Pieces, PublicServer
from allspan.launch.engine_flags import open_engine, sampling_params
from allspan.launch.models.find_model import FoundModel
from allspan.launch.secrets import API_KEYS
from allspan.protos.api.adapters import find_adapter
from allspan.protos.api.errors import AllspanError, ConfigError, InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import RequestTimings
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.running import host_and_port
from allspan.protos.cluster.tls import TlsFiles
from allspan.protos.config.adapters import parse_modules
from allspan.protos.config.flags import Parser, add_options, build
from allspan.protos.config.settings import AdapterConfig
from allspan.protos.text.stream.text_stream import TextStream

_SCHEMES = ("http", "https", "grpc", "grpcs")


@dataclass(frozen=True)
class AttachConfig:
    """The access to a server at a URL."""

    api_key_file: str = ""
    """Reads the key for the server of --attach from a file; the variable ALLSPAN_API_KEY holds one, too."""
    ssl_ca_certs: str = ""
    """Names a PEM file with the authority of that server's certificate; empty takes the system's authorities."""
    ssl_certfile: str = ""
    """Names a PEM file with this client's certificate, where that server asks for one."""
    ssl_keyfile: str = ""
    """Names the PEM file of its private key; empty reads it from --ssl-certfile."""


class ModelClient(Protocol):
    """Answers conversations and continues texts; closing an iterator ends its request."""

    @property
    def model(self) -> str:
        """The name of the model."""
        ...

    def chat(self, messages: Sequence[Message]) -> Pieces:
        """Yields the answer to a conversation."""
        ...

    def complete(self, prompt: str) -> Pieces:
        """Yields the continuation of a text."""
        ...


def add_client_options(parser: Parser) -> None:
    """Adds the flags for a server of --attach, and for an adapter of the model."""
    parser.add_argument(
        "--adapter",
        default="",
        metavar="NAME",
        help="Answers with the LoRA adapter of this name: one of --lora-modules, or one of the server of --attach.",
    )
    add_options(parser.group("attach", "access to the server of --attach"), AttachConfig)


def check_adapter(namespace: argparse.Namespace) -> None:
    """Raises AdapterNotFound for an adapter that the model which is to be started will not have."""
    if not namespace.attach:
        adapters = parse_modules(AdapterConfig(namespace.lora_modules))
        find_adapter(namespace.adapter, adapters)


@contextmanager
def open_client(namespace: argparse.Namespace, model: FoundModel | None, max_tokens: int) -> Iterator[ModelClient]:
    """Starts a cluster for `model`, attaches to one, or connects to a server; ends what it began."""
    config, name = build(AttachConfig, namespace), namespace.adapter
    server = None if model is not None else open_server(namespace.attach, config, name)
    if server is not None:
        try:
            yield ServerClient(server, namespace, max_tokens)
        finally:
            server.close()
        return
    with open_engine(namespace, model) as engine:
        yield EngineClient(engine, namespace, max_tokens)


def open_server(attach: str, config: AttachConfig, name: str = "") -> PublicServer | None:
    """Returns the server at a URL, or at HOST:PORT where one answers; None for a run directory and ranks' addresses.
    `name`: the model or adapter that requests go to; "": the first one of the server's."""
    from allspan.client.transport.public_http import HttpServer

    scheme, separator, address = attach.partition("://")
    access = Access(_key(config), TlsFiles(config.ssl_ca_certs, config.ssl_certfile, config.ssl_keyfile))
    if separator and scheme.lower() in ("http", "https"):
        return HttpServer(attach, access, name)
    from allspan.client.transport.public_grpc import GrpcServer

    if separator:
        if scheme.lower() not in _SCHEMES:
            raise ConfigError(f"--attach is {attach!r}, must begin with one of {', '.join(_SCHEMES)}, or be RUN_DIR")
        return GrpcServer(address.rstrip("/"), access, scheme.lower() == "grpcs", name)
    if "," in attach or Path(attach).expanduser().exists() or host_and_port(attach)[1] is None:
        return None
    with suppress(AllspanError):
        return GrpcServer(attach, access, model=name)
    with suppress(AllspanError):
        return HttpServer(f"http://{attach}", access, name)
    return None


def _key(config: AttachConfig) -> str:
    if not config.api_key_file:
        return next((key.split(",")[0].strip() for name in API_KEYS if (key := os.environ.get(name))), "")
    try:
        lines = Path(config.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {config.api_key_file} cannot be read: {error}") from None
    keys = [words[-1] for line in lines if (words := line.split()) and not words[0].startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {config.api_key_file} holds no key")
    return keys[0]


class EngineClient:
    """A cluster, of which a ClientEngine has the tokens."""

    def __init__(self, engine: ClientEngine, namespace: argparse.Namespace, max_tokens: int) -> None:
        """`namespace`: the sampling flags, read again for each answer."""
        self.engine = engine
        self._namespace = namespace
        self._max_tokens = max_tokens
        self._options = RequestOptions(adapter=namespace.adapter)

    @property
    def model(self) -> str:
        return self._options.adapter or self.engine.model

    def chat(self, messages: Sequence[Message]) -> Pieces:
        ids = self.engine.tokenizer.encode_chat([dict(message) for message in messages])
        room = self.engine.max_model_len - len(ids)
        if room < 1:
            raise InvalidRequest(
                f"the conversation has {len(ids)} tokens, the context is {self.engine.max_model_len}; /clear begins a "
                "new one",
                "messages",
            )
        params = self._params()
        bounded = params.with_(max_tokens=min(params.max_tokens, room), min_tokens=min(params.min_tokens, room))
        return self._stream(ids, bounded, continues=False)

    def complete(self, prompt: str) -> Pieces:
        return self._stream(self.engine.tokenizer.encode(prompt), self._params(), continues=True)

    def _params(self) -> SamplingParams:
        return sampling_params(self._namespace, self.engine.cluster.model_path, self._max_tokens)

    def _stream(self, ids: list[int], params: SamplingParams, continues: bool) -> Pieces:
        """`continues`: the text goes on from the prompt's."""
        handle, results = self.engine.start_request(ids, params, options=self._options)
        text_stream = TextStream(self.engine.tokenizer, params, continues)
        timings = RequestTimings()
        try:
            for output in results:
                delta = text_stream.push(output)
                timings = output.timings or timings
                yield Piece(delta.text, tuple(delta.token_ids), delta.finish_reason, len(ids), timings=timings)
                if delta.finish_reason:
                    break
        finally:
            self.engine.stop_request(handle)
            self.engine.release_request(handle)


class ServerClient:
    """A server; fields that no flag sets are its own to choose, but for the length of a text's continuation, which
    other servers than allspan limit to 16 tokens."""

    def __init__(self, server: PublicServer, namespace: argparse.Namespace, max_tokens: int) -> None:
        self._server = server
        self._namespace = namespace
        self._max_tokens = max_tokens

    @property
    def model(self) -> str:
        return self._server.model

    def chat(self, messages: Sequence[Message]) -> Pieces:
        return self._timed(self._server.chat(messages, given_fields(self._namespace)))

    def complete(self, prompt: str) -> Pieces:
        fields = {"max_tokens": self._max_tokens} | given_fields(self._namespace)
        return self._timed(self._server.complete(prompt, fields))

    def _timed(self, pieces: Pieces) -> Pieces:
        """Adds the times, measured here."""
        started = time.monotonic()
        first = 0.0
        for piece in pieces:
            first = first or (time.monotonic() - started if piece.text else 0.0)
            if piece.finish_reason:
                spent = time.monotonic() - started
                timings = RequestTimings(
                    ttft_s=first,
                    total_s=spent,
                    prompt_tokens=piece.prompt_tokens,
                    output_tokens=piece.output_tokens,
                )
                piece = replace(piece, timings=timings)
            yield piece


def given_fields(namespace: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of SamplingParams that a flag or `/set` has set."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return {name: value for name in names if (value := getattr(namespace, name, None)) is not None}
