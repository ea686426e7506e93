"""What every rank has to say before all of them go on alike: a failure on one is a failure on all."""

from __future__ import annotations

import torch

from allspan.worker.parallel.base import Collectives, all_ranks

MESSAGE_BYTES = 2048
"""The bytes of a message that the other ranks get."""


def exchange(message: str, collectives: Collectives) -> list[str]:
    """Returns every rank's message, cut to MESSAGE_BYTES, in rank order. All ranks call it at once."""
    data = message.encode(errors="replace")[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    mine, world = torch.frombuffer(bytearray(data), dtype=torch.int32).view(1, -1), all_ranks(collectives)
    everyone = torch.empty((world.size, mine.shape[1]), dtype=torch.int32)
    world.all_gather_rows(mine, everyone)
    return [bytes(row.view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace") for row in everyone]
