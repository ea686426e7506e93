"""The store of responses in memory, so that a conversation can be continued: bounded in number, size and time."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from allspan.client.gateway.http.errors import HttpError
from allspan.client.gateway.openai.shapes import Json
from allspan.protos.api.errors import InvalidRequest

MAX_BYTES = 64 * 2**20
"""Most bytes of all that is kept. It is kept as JSON: as Python's objects it would take several times as much."""


@dataclass(frozen=True)
class StoredResponse:
    """One response with its input and its history."""

    response: Json
    input: list[Json]
    """The items of its own input."""
    history: list[Json]
    """All items of the conversation up to its end."""


class ResponseStore:
    """The stored responses; each is visible to its owner alone. The oldest make room for new ones."""

    def __init__(self, max_entries: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`ttl`: seconds from when it was put in."""
        self._max_entries = max_entries
        self._ttl = ttl
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], tuple[bytes, float]] = OrderedDict()
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_entries > 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Takes the place of one with the same id; one that is larger than all may be is not kept."""
        key = (owner, stored.response["id"])
        self._drop(key)
        data = json.dumps([stored.response, stored.input, stored.history]).encode()
        if not self.is_on or len(data) > MAX_BYTES:
            return
        self._entries[key] = (data, self._clock() + self._ttl)
        self._bytes += len(data)
        while self._entries:
            oldest, (_, expires) = next(iter(self._entries.items()))
            if len(self._entries) <= self._max_entries and self._bytes <= MAX_BYTES and expires > self._clock():
                return
            self._drop(oldest)

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """Returns a response; HttpError 404 for one that does not exist (any more) or has another owner."""
        if (found := self._find(owner, response_id)) is None:
            raise HttpError(404, f"response {response_id[:128]!r} is not kept here: {self._why()}")
        return found

    def history(self, owner: str, response_id: str) -> list[Json]:
        """Returns the history of the conversation to continue; InvalidRequest in place of the 404."""
        if (found := self._find(owner, response_id)) is None:
            field = "previous_response_id"
            raise InvalidRequest(f"{field} is {response_id[:128]!r}, which is not kept here: {self._why()}", field)
        return found.history

    def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response; HttpError 404 when there is none."""
        self.get(owner, response_id)
        self._drop((owner, response_id))

    def _find(self, owner: str, response_id: str) -> StoredResponse | None:
        found = self._entries.get((owner, response_id))
        if found is not None and found[1] > self._clock():
            return StoredResponse(*json.loads(found[0]))
        self._drop((owner, response_id))
        return None

    def _why(self) -> str:
        if not self.is_on:
            return "this server keeps none (--max-stored-responses is 0); give all items in input"
        return (
            f"a response is kept for {self._ttl:g} s, of the last {self._max_entries}, unless store is false; "
            "give all items in input"
        )

    def _drop(self, key: tuple[str, str]) -> None:
        found = self._entries.pop(key, None)
        self._bytes -= len(found[0]) if found else 0
