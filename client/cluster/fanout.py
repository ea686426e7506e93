"""Sends one request's payload to every rank of a world: followers first and together, the leader last, all or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from allspan.client.transport.base import START_REQUEST, STOP_REQUEST, Transport
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import AllspanError, DeadlineExceeded

logger = logging.getLogger(__name__)


class RankRefused(Exception):
    """Rank `rank` did not take a request, for `error`.

    `ambiguous`: it is the leader, and it did not answer, so it may have taken it all the same.
    """

    def __init__(self, rank: int, error: AllspanError) -> None:
        super().__init__(error.message)
        self.rank = rank
        self.error = error
        self.ambiguous = rank == 0 and isinstance(error, DeadlineExceeded)


async def fan_out(ranks: Sequence[Transport], message: pb.StartRequestMessage, timeout: float) -> None:
    """Sends the payloads. Once the leader has its own, every rank has. Raises RankRefused after withdrawing it from the
    ranks that took it."""
    replies = await asyncio.gather(
        *(rank.unary(START_REQUEST, message, timeout) for rank in ranks[1:]), return_exceptions=True
    )
    failures = [(rank, error) for rank, error in enumerate(replies, start=1) if isinstance(error, BaseException)]
    refusal = _first_refusal(failures)
    if refusal is None:
        try:
            await ranks[0].unary(START_REQUEST, message, timeout)
            return
        except AllspanError as error:
            refusal = RankRefused(0, error)
    if refusal.ambiguous:
        # A follower's payload may go only when the leader has surely dropped its own: the leader's final output tells.
        await withdraw(ranks[:1], [message.request_id], timeout)
    else:
        refused = {rank for rank, error in failures if not isinstance(error, DeadlineExceeded)}
        holders = [transport for rank, transport in enumerate(ranks) if rank and rank not in refused]
        await withdraw(holders, [message.request_id], timeout)
    raise refusal


async def withdraw(ranks: Sequence[Transport], request_ids: Sequence[bytes], timeout: float) -> bool:
    """Sends StopRequest to some ranks; returns whether all have received it. One that cannot be reached loses the
    request with its world or its lease."""
    message = pb.RequestIds(request_ids=request_ids)
    calls = (rank.unary(STOP_REQUEST, message, timeout) for rank in ranks)
    replies = await asyncio.gather(*calls, return_exceptions=True)
    deaf = [reply for reply in replies if isinstance(reply, BaseException)]
    for reply in deaf:
        logger.info("a rank did not hear that %d requests were withdrawn: %s", len(request_ids), reply)
    return not deaf


def _first_refusal(failures: Sequence[tuple[int, BaseException]]) -> RankRefused | None:
    for rank, error in failures:
        if not isinstance(error, AllspanError):
            raise error
        return RankRefused(rank, error)
    return None
