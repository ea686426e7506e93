"""KV events over ZeroMQ from a served cluster with two replicas, as a subscriber written for vLLM reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import zmq

from support.serving import Served, runtime_folder
from support.smg import free_port
from support.waiting import wait_until
from support.worker_client import SERVICE

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(40, 140))


class Follower:
    """A subscriber of one replica that keeps which pages it holds."""

    def __init__(self, context: Any, port: int, replay: int) -> None:
        self.live, self._missed = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.live.connect(f"tcp://127.0.0.1:{port}")
        self._missed.connect(f"tcp://127.0.0.1:{replay}")

    def replayed(self) -> list[tuple[int, Any]]:
        """Numbers and batches of all that was published."""
        self._missed.send_multipart((b"", (0).to_bytes(8, "big")))
        found: list[tuple[int, Any]] = []
        while self._missed.poll(5000):
            _, number, payload = self._missed.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
        raise AssertionError("the replay has no end")

    def stored(self) -> list[int]:
        """The tokens of the pages that it was told of since the last clear, in order."""
        tokens: list[int] = []
        for _, (_, events, _) in self.replayed():
            for name, *fields in events:
                if name == "AllBlocksCleared":
                    tokens = []
                elif name == "BlockStored":
                    keys, _, ids, size, _, medium = fields
                    assert (len(ids), medium) == (len(keys) * size, "GPU")
                    tokens += ids
        return tokens


def test_a_prompts_pages_are_told_once_with_their_rank_and_cleared_with_the_cache(tiny: Path) -> None:
    ports = [free_port(behind=1) for _ in range(3)]  # of the first replica; the second has the next ones
    words = ["--ranks=1", "--data-parallel-size=2", "--threads=1", "--oversubscribe", "--served-model-name=tiny"]
    words += [f"--worker-port={ports[2]}"]
    words += [f"--kv-events-endpoint=tcp://127.0.0.1:{ports[0]}"]
    words += [f"--kv-events-replay-endpoint=tcp://127.0.0.1:{ports[1]}"]
    context: Any = zmq.Context()
    with runtime_folder() as runtime:
        served = Served(tiny, *words, runtime=runtime)
        try:
            served.wait_ready()
            followers = [Follower(context, ports[0] + rank, ports[1] + rank) for rank in range(2)]
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            for _ in range(2):
                assert httpx.post(f"{served.http}/v1/completions", json=body, timeout=60).status_code == 200
            wait_until(lambda: any(each.stored() for each in followers), 10, "the prompt's pages")
            (told,) = [tokens for each in followers if (tokens := each.stored())]
            assert len(told) >= 64
            assert told == PROMPT[: len(told)]
            for rank, each in enumerate(followers):
                batches = each.replayed()
                assert [number for number, _ in batches] == list(range(len(batches)))
                assert {batch[2] for _, batch in batches} == {rank}
            (holder,) = [each for each in followers if each.stored()]
            assert holder.live.poll(5000)
            assert len(holder.live.recv_multipart()) == 3
            with grpc.insecure_channel(f"127.0.0.1:{ports[2]}") as channel:
                assert channel.unary_unary(f"/{SERVICE}/FlushCache")(b"", timeout=30)
            wait_until(lambda: not holder.stored(), 10, "the news that nothing is cached")
        finally:
            served.kill()
            context.destroy(linger=0)
