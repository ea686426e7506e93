"""Inbox: payloads on their way from the facade (any thread) to the step loop (one thread), on every rank."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable

from allspan.protos.api.errors import AlreadyExists, DeadlineExceeded, InternalError, QueueFull
from allspan.worker.scheduler.request import Request

WITHDRAWN_SECONDS = 60.0
"""How long a withdrawn payload is kept, since a plan that the leader made before may still join it; and how long the
id of a cancelled request is refused, since a plan that drops it may still be on its way."""
MOST_WITHDRAWN = 4096
"""The most withdrawn payloads; beyond it the oldest are forgotten early. It is far more than are withdrawn while a plan
is on its way."""


class Inbox:
    """Payloads by request id, from their arrival until a plan drops them. Thread-safe."""

    def __init__(self, capacity: int, timeout: float = 10.0) -> None:
        """Holds at most `capacity` payloads, withdrawn ones apart; a plan waits at most `timeout` seconds for one."""
        self._capacity = capacity
        self._timeout = timeout
        self._condition = threading.Condition()
        self._payloads: dict[bytes, Request] = {}
        self._joined: set[bytes] = set()
        self._withdrawn: dict[bytes, float] = {}
        self._retired: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def put(self, request: Request) -> None:
        """Raises AlreadyExists for an id in use, QueueFull when the inbox is full. A payload that was withdrawn may
        come again; another one under its id may not."""
        request_id = request.request_id
        with self._condition:
            self._expire()
            comes_again = request_id in self._withdrawn and request.digest() == self._payloads[request_id].digest()
            if not comes_again and (request_id in self._payloads or request_id in self._retired):
                raise AlreadyExists(f"request_id {request_id.hex()} is in use, or cancelled just now; choose another")
            # Were withdrawn ones counted, a minute of refusals by the leader would fill its followers' inboxes.
            held = len(self._payloads) - len(self._withdrawn)
            if held >= self._capacity:
                raise QueueFull(f"the inbox holds {held} requests, its limit; try again later")
            self._withdrawn.pop(request_id, None)
            self._payloads.setdefault(request_id, request)
            self._condition.notify_all()

    def take(self, request_id: bytes, digest: int) -> Request:
        """The payload that a plan joins; stays here until `drop`. Raises DeadlineExceeded when it does not come, and
        InternalError when it is not the one that the leader has."""
        with self._condition:
            if not self._condition.wait_for(lambda: request_id in self._payloads, self._timeout):
                raise DeadlineExceeded(
                    f"the plan joins request {request_id.hex()}, its payload did not come within {self._timeout} s"
                )
            request = self._payloads[request_id]
            self._joined.add(request_id)
            self._withdrawn.pop(request_id, None)
        if request.digest() != digest:
            raise InternalError(f"request {request_id.hex()} differs between this rank and the leader")
        return request

    def drop(self, request_id: bytes) -> None:
        """A plan forgets a request; one that never came here is no error (the facade was refused by another rank)."""
        with self._condition:
            self._forget(request_id)

    def withdraw(self, request_ids: Iterable[bytes]) -> None:
        """The facade takes payloads back. One that a plan has joined stays until a plan drops it."""
        with self._condition:
            now = time.monotonic()
            for request_id in request_ids:
                if request_id in self._payloads and request_id not in self._joined:
                    self._withdrawn.setdefault(request_id, now + WITHDRAWN_SECONDS)
            self._expire()

    def retire(self, request_id: bytes) -> None:
        """Leader: a request was cancelled. Its id is in use for a while yet."""
        with self._condition:
            self._retired[request_id] = time.monotonic() + WITHDRAWN_SECONDS

    def _expire(self) -> None:
        for request_id in _expired(self._retired):
            del self._retired[request_id]
        too_many = itertools.islice(self._withdrawn, max(0, len(self._withdrawn) - MOST_WITHDRAWN))
        for request_id in (*too_many, *_expired(self._withdrawn)):
            self._forget(request_id)

    def _forget(self, request_id: bytes) -> None:
        self._payloads.pop(request_id, None)
        self._joined.discard(request_id)
        self._withdrawn.pop(request_id, None)


def _expired(deadlines: dict[bytes, float]) -> list[bytes]:
    """Returns the ids whose time is over. All wait equally long, so they stand in order."""
    now = time.monotonic()
    return list(itertools.takewhile(lambda request_id: deadlines[request_id] <= now, deadlines))
