"""A session as `BatchGenerate`, the loop of `generate`, uses it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from allspan.client.cluster.requests import Session
from allspan.protos.api.batch_generate import Started, Work
from allspan.protos.api.errors import AllspanError, Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.prompts import parse_request_id
from allspan.protos.api.results import RequestHandle


class SessionCalls:
    """Starts requests on the session's loop, all at the same time."""

    def __init__(self, session: Session, model: str, options: RequestOptions) -> None:
        self._session = session
        self._model = model
        self._options = options

    async def start(self, work: Sequence[Work]) -> list[Started | AllspanError]:
        handles = [RequestHandle(uuid.uuid4().hex, self._model) for _ in work]
        try:
            return list(await asyncio.gather(*map(self._start, handles, work)))
        except BaseException:
            for handle in handles:
                self.release(handle)
            raise

    async def outlast(self, error: Unavailable) -> None:
        """Waits until a start may be tried again while requests of this session are being resumed; raises `error`
        without any."""
        if not self._session.queues():
            raise error
        await self._session.outlast()

    def release(self, handle: RequestHandle) -> None:
        self._session.release(parse_request_id(handle.request_id))

    async def _start(self, handle: RequestHandle, work: Work) -> Started | AllspanError:
        request_id = parse_request_id(handle.request_id)
        try:
            return handle, await self._session.start(request_id, *work, self._options)
        except AllspanError as error:
            return error
