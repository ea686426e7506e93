"""A world over hosts tells why it could not begin."""

from __future__ import annotations

import os
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from allspan.launch.hosts.fleet import Fleet
from allspan.launch.hosts.messages import Message
from allspan.launch.hosts.world import HostsWorld
from allspan.protos.api.errors import Unavailable


class _CutOffFleet:
    """Its second host does not answer."""

    can_shrink = False

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def connect(self, min_hosts: int = 0) -> None:
        raise Unavailable("host b cannot be used: no route to it")

    def clear(self, epoch: int) -> list[str]:
        return []


def test_a_world_whose_host_cannot_be_reached_died_of_that(tmp_path: Path) -> None:
    plan = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(path=str(tmp_path))))
    fleet = _CutOffFleet()
    world = HostsWorld(cast("Any", plan), cast("Fleet", fleet), cast("Any", None), epoch=2)
    assert world.wait([]) == "died"
    assert world.death().cause == "host b cannot be used: no route to it"
    world.end(None)
    os.close(fleet.event_fd)
