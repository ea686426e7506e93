"""Ten times what the queue holds, at once, and then nobody wants it: refused with advice, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos import inference_pb2, inference_pb2_grpc
from allspan.protos.api.errors import QueueFull
from allspan.protos.api.results import RequestHandle
from support.serving import Served
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(180)

QUEUE, ROWS = 16, 4
ENDLESS = SamplingParams(max_tokens=60000, temperature=0.0, ignore_eos=True)


async def flood(engine: ClientEngine, count: int) -> tuple[list[RequestHandle], int]:
    """So many requests at once: those that were taken, and how many were refused because the queue is full."""
    prompts = [[1 + i % 250, 2, 3, *range(i % 100)] for i in range(count)]
    attempts = (engine.astart_request(prompt, ENDLESS) for prompt in prompts)
    replies = await asyncio.gather(*attempts, return_exceptions=True)
    taken = [reply[0] for reply in replies if not isinstance(reply, BaseException)]
    refused = [reply for reply in replies if isinstance(reply, QueueFull)]
    assert len(taken) + len(refused) == count, [reply for reply in replies if isinstance(reply, BaseException)]
    return taken, len(refused)


def fill(engine: ClientEngine) -> list[RequestHandle]:
    """What the queue still takes once every row is in use."""
    wait_until(lambda: engine.statistics().running == ROWS, 10.0, "rows in use")
    taken = []
    while True:
        try:
            taken.append(engine.start_request([1, 2, 3], ENDLESS)[0])
        except QueueFull:
            return taken


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def refused_over_http(served: Served) -> tuple[int, str, str]:
    """Status, Retry-After and message."""
    body = json.dumps({"prompt": "ab", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{served.http}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as answer:
        return answer.code, answer.headers["Retry-After"], json.load(answer)["error"]["message"]


def refused_over_grpc(served: Served) -> tuple[grpc.StatusCode, dict[str, str]]:
    """Status and what the server says beside it."""
    with grpc.insecure_channel(served.grpc) as channel:
        options = inference_pb2.SamplingOptions(max_tokens=3)
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(inference_pb2.GenerateRequest(text="abc", sampling=options), timeout=30))
    return caught.value.code(), dict(caught.value.trailing_metadata())


def test_ten_times_the_queue_is_refused_with_advice_and_leaves_nothing(start: Start) -> None:
    served = start(f"--max-queued-requests={QUEUE}", f"--max-num-seqs={ROWS}")
    ranks = [served.rank_pid(rank) for rank in (0, 1)]
    short = ENDLESS.with_(max_tokens=16)
    with ClientEngine(attach=served.run_dir) as engine:
        expected = engine.generate([[7, 8, 9]], short)[0].token_ids
        sizes = []
        for _ in range(3):
            taken, refused = asyncio.run(flood(engine, 10 * QUEUE))
            assert QUEUE <= len(taken) <= QUEUE + ROWS
            assert refused == 10 * QUEUE - len(taken)
            if not sizes:
                taken += fill(engine)
                status, retry_after, message = refused_over_http(served)
                assert (status, int(retry_after) >= 1) == (429, True)
                assert str(QUEUE) in message
                code, told = refused_over_grpc(served)
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert int(told["retry-after"]) >= 1
            for handle in taken:
                engine.release_request(handle)

            def is_idle() -> bool:
                found = engine.statistics()
                return (found.running, found.waiting, found.pages_used) == (0, 0, 0)

            wait_until(is_idle, 10.0, "an engine that has let everything go")
            sizes.append([resident_mib(pid) for pid in ranks])
            assert engine.generate([[7, 8, 9]], short)[0].token_ids == expected
    for before, after in zip(sizes[0], sizes[-1], strict=True):
        assert after - before < 8.0, sizes
    assert served.ask_to_end() == 0
