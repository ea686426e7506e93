"""The contract of the clients of a server's public services, HTTP and gRPC, which `allspan chat --attach URL` uses."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from allspan.protos.api.results import RequestTimings
from allspan.protos.cluster.tls import NO_TLS, TlsFiles

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0
"""Seconds without a byte of an answer after which it is given up."""

Message = Mapping[str, str]
"""One turn of a conversation: "role" and "content"."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer. The last one has a finish reason and, where the server tells them, the counts."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Empty over HTTP, which sends text."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    timings: RequestTimings | None = None


Pieces = Generator[Piece, None, None]
"""An answer; closing it ends its request."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a server may ask of its clients: a key, and the files for TLS."""

    key: str = ""
    tls: TlsFiles = NO_TLS

    def __repr__(self) -> str:
        return f"Access({'with' if self.key else 'without'} a key)"


class PublicServer(Protocol):
    """One server, asked by one thread. Failures are AllspanErrors; closing an iterator ends its request."""

    @property
    def model(self) -> str:
        """The name of the model, or of its adapter, that requests go to."""
        ...

    def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Pieces:
        """Yields the answer to a conversation; `fields` are those of SamplingParams that are given."""
        ...

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Pieces:
        """Yields the continuation of a text."""
        ...

    def close(self) -> None:
        """Frees the connection."""
        ...
