"""Leases: what each client's Results stream still has to carry. Used by the service's asyncio loop alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import AllspanError, AlreadyExists, InvalidRequest, QueueFull
from allspan.protos.api.results import Output
from allspan.protos.convert import output_to_wire
from allspan.worker.scheduler.request import Request

MAX_CLIENTS = 256
MAX_BATCH_BYTES = 4 * 2**20
"""A message is closed once it is this long; the rest goes into the next one."""

MESSAGE_S = 0.001
OUTPUT_S = 0.00012
"""Processor time of a message on its whole way to the readers (rank, gateway and readers), and of each output in it, as
measured on two processors that were busy with other work."""
SHARE = 0.025
"""What messages may take of processors that are saturated, where they take it from the step."""
MOST_PAUSE_S = 0.125

Outcome = tuple[Request, Output | AllspanError]


def is_urgent(result: Output | AllspanError) -> bool:
    """A request's first token, or its end: they come with timings, or as an error."""
    return isinstance(result, AllspanError) or result.timings is not None


@dataclass(slots=True)
class _Pending:
    output: Output | None = None
    error: AllspanError | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.output is None else len(self.output.token_ids)


@dataclass(slots=True)
class Lease:
    """One client's stream. What a slow reader has not taken is merged request by request, so that it is bounded by the
    tokens of its requests."""

    client_id: str
    capacity: int
    interval: int = 0
    """A request's tokens wait until there are this many, unless they are urgent; 0: until `release`."""
    request_ids: dict[bytes, None] = field(default_factory=dict)
    """Open requests, oldest first. A follower is not notified of ends; it forgets the oldest beyond `capacity`."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False
    _waiting: dict[bytes, _Pending] = field(default_factory=dict)
    _due: dict[bytes, _Pending] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """`take` would give nothing."""
        return not self._due

    def add(self, request_id: bytes) -> None:
        self.request_ids[request_id] = None
        if len(self.request_ids) > self.capacity:
            del self.request_ids[next(iter(self.request_ids))]

    def put(self, request_id: bytes, result: Output | AllspanError) -> None:
        pending = self._due.get(request_id) or self._waiting.setdefault(request_id, _Pending())
        if isinstance(result, AllspanError):
            pending.error = result
        else:
            pending.output = result if pending.output is None else pending.output.merged(result)
        if isinstance(result, AllspanError) or result.finish_reason:
            self.request_ids.pop(request_id, None)
        if is_urgent(result) or (self.interval and pending.num_tokens >= self.interval):
            if self._waiting.pop(request_id, None) is not None:
                self._due[request_id] = pending
            self.news.set()

    def release(self) -> int:
        """What could wait is to be sent next. Returns for how many requests there is something to send."""
        if self._waiting:
            self._due |= self._waiting
            self._waiting.clear()
            self.news.set()
        return len(self._due)

    def close(self) -> None:
        """It ends once it has carried what it still holds."""
        self.closing = True
        self.release()
        self.news.set()

    def take(self) -> list[pb.RequestOutput]:
        """What is to be sent next, up to MAX_BATCH_BYTES; empty when there is nothing."""
        outputs: list[pb.RequestOutput] = []
        size = 0
        while self._due and size < MAX_BATCH_BYTES:
            request_id = next(iter(self._due))
            for message in _messages(request_id, self._due.pop(request_id)):
                outputs.append(message)
                size += message.ByteSize()
        if not self._due and not self.closing:
            self.news.clear()
        return outputs


def _messages(request_id: bytes, pending: _Pending) -> Iterator[pb.RequestOutput]:
    if pending.output is not None:
        yield output_to_wire(request_id, pending.output)
    if (error := pending.error) is not None:
        yield pb.RequestOutput(
            request_id=request_id, finish_reason="error", error_code=error.code, error_message=error.message
        )


class Leases:
    """Every client's lease, by the client's id."""

    def __init__(self, capacity: int, interval: int = 0, saturated: Callable[[], int] = lambda: 0) -> None:
        """`interval`: see `Lease`. `saturated`: the number of processors while they are saturated, else 0."""
        self._capacity = capacity
        self._interval = interval
        self._saturated = saturated
        self._by_client: dict[str, Lease] = {}
        self._closing = False

    def open(self, client_id: str) -> Lease:
        """Raises InvalidRequest, AlreadyExists or QueueFull."""
        if not client_id or len(client_id) > 128:
            raise InvalidRequest(f"client_id has {len(client_id)} characters, must have 1 to 128", "client_id")
        if client_id in self._by_client:
            raise AlreadyExists(f"client_id {client_id!r} has an open Results stream; each client has one of its own")
        if len(self._by_client) >= MAX_CLIENTS:
            raise QueueFull(f"{MAX_CLIENTS} clients are connected, the limit; try again later")
        lease = self._by_client[client_id] = Lease(client_id, self._capacity, self._interval)
        if self._closing:
            lease.close()
        return lease

    def find(self, client_id: str) -> Lease:
        """Raises InvalidRequest for a client without a stream: its request would have no end."""
        lease = self._by_client.get(client_id)
        if lease is None:
            raise InvalidRequest(f"client_id {client_id!r} has no open Results stream; open it first", "client_id")
        return lease

    def close(self, lease: Lease) -> tuple[bytes, ...]:
        """The stream has ended. Returns the requests that are still open, to be cancelled."""
        del self._by_client[lease.client_id]
        return tuple(lease.request_ids)

    def forget(self, request_ids: Iterable[bytes]) -> None:
        """A follower's payloads were withdrawn."""
        for request_id in request_ids:
            for lease in self._by_client.values():
                lease.request_ids.pop(request_id, None)

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        """Outcomes of requests whose client has gone are dropped."""
        for request, result in outcomes:
            lease = self._by_client.get(request.client_id)
            if lease is not None:
                lease.put(request.request_id, result)

    def release(self) -> float:
        """Lets every stream carry what could wait. Returns for how many seconds from now on new tokens can wait: 0, so
        that each step's leave with it, unless the processors are saturated."""
        if self._interval:
            return 0.0
        count = sum(lease.release() for lease in self._by_client.values())
        if not count or not (processors := self._saturated()):
            return 0.0
        return min((MESSAGE_S + count * OUTPUT_S) / (SHARE * processors), MOST_PAUSE_S)

    def close_all(self) -> None:
        """Streams end by themselves once they have carried what they still hold."""
        self._closing = True
        for lease in self._by_client.values():
            lease.close()
