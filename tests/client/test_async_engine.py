"""An engine whose results arrive on its program's own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from allspan.client.async_engine import AsyncClientEngine
from allspan.protos.api.errors import Unavailable
from allspan.protos.api.results import RequestState
from allspan.protos.api.sampling import SamplingParams
from support.fake_worker import FakeCluster


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncClientEngine]:
    loop = asyncio.get_running_loop()
    with FakeCluster(tmp_path, step_s=0.002) as cluster:
        made = await asyncio.to_thread(lambda: AsyncClientEngine(loop, attach=cluster.run_dir))
        yield made
        await asyncio.to_thread(made.close)


@pytest.fixture
def loops() -> set[threading.Thread]:
    """The loops that other engines have at first."""
    return loops_now()


def loops_now() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "allspan-client"}


async def test_tokens_are_read_on_the_loop_that_they_arrive_on(
    loops: set[threading.Thread], engine: AsyncClientEngine
) -> None:
    assert loops_now() <= loops, "it has no loop of its own"
    _, queue = await engine.astart_request([1], SamplingParams(max_tokens=5, ignore_eos=True))
    tokens = [token async for output in queue for token in output.token_ids]
    assert tokens == [2, 3, 4, 5, 6]
    assert (await engine.astatistics()).finished_requests == 1


async def test_releasing_on_the_loop_ends_the_request_at_once(engine: AsyncClientEngine) -> None:
    handle, queue = await engine.astart_request([1], SamplingParams(max_tokens=400))
    engine.release_request(handle)
    assert queue.state is RequestState.CANCELLED


async def test_readers_on_other_loops_are_woken_too(engine: AsyncClientEngine) -> None:
    _, queue = await engine.astart_request([1], SamplingParams(max_tokens=3, ignore_eos=True))

    async def read() -> list[int]:
        return [token async for output in queue for token in output.token_ids]

    assert await asyncio.to_thread(asyncio.run, read()) == [2, 3, 4]


async def test_a_closed_one_refuses(engine: AsyncClientEngine) -> None:
    await asyncio.to_thread(engine.close)
    with pytest.raises(Unavailable, match="closed"):
        await engine.astart_request([1])
