"""The contract between the facade and one rank, and the calls that it carries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from allspan.protos import worker_pb2 as pb
from allspan.protos.cluster.tls import NO_TLS, TlsFiles

Request = TypeVar("Request")
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Method(Generic[Request, Reply]):
    """The description of one call of `allspan.worker.v1.Worker`: its name and its messages."""

    name: str
    request: type[Request]
    reply: type[Reply]


START_REQUEST = Method("StartRequest", pb.StartRequestMessage, pb.Ack)
STOP_REQUEST = Method("StopRequest", pb.RequestIds, pb.Ack)
RESEND_PAGES = Method("ResendPages", pb.ResendPagesRequest, pb.Ack)
STATUS = Method("Status", pb.StatusRequest, pb.WorkerStatus)
CONTROL = Method("Control", pb.ControlRequest, pb.Ack)
LOAD_ADAPTER = Method("LoadAdapter", pb.LoadAdapterRequest, pb.AdapterReply)
UNLOAD_ADAPTER = Method("UnloadAdapter", pb.UnloadAdapterRequest, pb.AdapterReply)
INSPECT = Method("Inspect", pb.InspectRequest, pb.InspectReply)
RESULTS = Method("Results", pb.ResultsSubscription, pb.StepOutputs)


class Transport(Protocol):
    """Calls to one rank, from one asyncio loop. Failures are AllspanErrors; a rank that is gone is Unavailable."""

    async def unary(self, method: Method[Request, Reply], request: Request, timeout: float) -> Reply:
        """Sends one message and returns the one answer; DeadlineExceeded after `timeout` seconds."""
        ...

    def stream(self, method: Method[Request, Reply], request: Request) -> AsyncIterator[Reply]:
        """Yields messages until the rank ends the stream; ending the iteration ends the call."""
        ...

    async def close(self) -> None:
        """Ends every call and frees the connection. Idempotent."""
        ...


class Connect(Protocol):
    """Makes the transport to a rank's address ("unix:/…" or "host:port", there with TLS); connects on first use."""

    def __call__(self, address: str, tls: TlsFiles = NO_TLS) -> Transport:
        """Returns a transport to an address; ConfigError for files that do not fit, and for an address of another host
        without any."""
        ...
