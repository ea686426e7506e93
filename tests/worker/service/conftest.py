"""A served leader, a served follower, and a client of the leader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.served_rank import Client, Rank, connected


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.server.stop()
    assert not rank.failures


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path, is_leader=False)
    yield rank
    rank.server.stop()
    assert not rank.failures


@pytest.fixture
async def client(leader: Rank) -> AsyncIterator[Client]:
    async for client in connected(leader):
        yield client
