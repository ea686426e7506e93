"""Fixtures of tests whose scripted ranks die and come back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.replicas import Replicas


@pytest.fixture
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a restart looks often."""
    monkeypatch.setattr("allspan.client.cluster.replica.RECONNECT_POLL_S", 0.002)
    monkeypatch.setattr("allspan.client.cluster.replica.CAUSE_POLL_S", 0.001)


@pytest.fixture
async def two() -> AsyncIterator[Replicas]:
    made = Replicas()
    await made.session.attach(5)
    yield made
    await made.session.close()
