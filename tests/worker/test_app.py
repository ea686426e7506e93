"""Ranks started by hand under a plain mpirun, on a tiny model with random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo, error_file, read_cluster, read_rank
from allspan.protos.convert import sampling_to_wire
from allspan.protos.worker_pb2_grpc import WorkerStub
from support.mpirun import find_mpirun, mpi_environment
from support.waiting import wait_until

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}


class Ranks:
    """A world of ranks (0: one rank without mpirun) and what it said."""

    def __init__(self, folder: Path, model: Path, ranks: int, flags: tuple[str, ...]) -> None:
        self.run_dir = folder / "r"
        self.log = folder / "log"
        launcher = [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-n", str(ranks)] if ranks else []
        worker = [sys.executable, "-m", "allspan.worker", "--model", str(model), "--run-dir", str(self.run_dir)]
        sizes = ["--load-format", "dummy", "--max-num-seqs", "4", "--kv-cache-bytes", "30000000"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*launcher, *worker, *sizes, *flags],
                env=mpi_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_ready(self) -> ClusterInfo:
        def ready() -> bool:
            assert self.process.poll() is None, self.said
            try:
                return read_cluster(self.run_dir).state == "ready"
            except ConfigError:
                return False

        wait_until(ready, 60, "the cluster")
        return read_cluster(self.run_dir)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


Start = Callable[..., Ranks]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="as-") as name:
        yield Path(name)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    started: list[Ranks] = []

    def begin(ranks: int, *flags: str, model: Path = model) -> Ranks:
        started.append(Ranks(folder, model, ranks, flags))
        return started[-1]

    yield begin
    for world in started:
        world.stop()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def generate(info: ClusterInfo, count: int) -> list[int]:
    """Asks the ranks themselves, as a facade does: followers first, the leader last."""
    channels = [grpc.insecure_channel(rank.address) for rank in info.ranks]
    stubs: list[Any] = [WorkerStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    streams = [stub.Results(pb.ResultsSubscription(client_id="test", heartbeat_ms=200)) for stub in stubs]
    for stream in streams:
        next(stream)
    params = SamplingParams(max_tokens=count, temperature=0.0, seed=1, ignore_eos=True)
    for stub in reversed(stubs):
        stub.StartRequest(
            pb.StartRequestMessage(
                request_id=bytes(16),
                client_id="test",
                prompt_token_ids=range(5, 25),
                sampling=sampling_to_wire(params),
                epoch=info.epoch,
            ),
            timeout=30,
        )
    tokens: list[int] = []
    for message in streams[0]:
        tokens += [token for output in message.outputs for token in output.token_ids]
        if any(output.finish_reason for output in message.outputs):
            break
    for channel in channels:
        channel.close()
    return tokens


def test_ranks_started_by_hand_serve_and_stop_in_order(start: Start) -> None:
    world = start(2)
    info = world.wait_ready()
    assert [rank.rank for rank in info.ranks] == [0, 1]
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (300, 4096, (1,))
    assert len(generate(info, 12)) == 12
    assert "KV cache size: " in world.said
    assert "rank 1 of 2" in world.said
    for rank in info.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert world.process.wait(15) == 0, world.said
    assert read_cluster(world.run_dir).state == "stopped"
    assert sorted(path.name for path in world.run_dir.iterdir()) == ["cluster.json"]


def test_one_rank_needs_neither_mpirun_nor_mpi(start: Start) -> None:
    world = start(0)
    info = world.wait_ready()
    assert len(generate(info, 5)) == 5
    if sys.platform == "linux":
        assert "libmpi" not in Path(f"/proc/{info.ranks[0].pid}/maps").read_text()
    world.process.terminate()
    assert world.process.wait(15) == 0, world.said


def test_two_stages_of_two_ranks_make_the_tokens_of_two_ranks_and_stop_in_order(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "deep"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 3}))
    tokens = []
    for ranks, stages in ((2, 1), (4, 2)):
        world = start(ranks, "--pipeline-parallel-size", str(stages), model=model)
        info = world.wait_ready()
        tokens.append(generate(info, 12))
        for rank in info.ranks:
            os.kill(rank.pid, signal.SIGTERM)
        assert world.process.wait(15) == 0, world.said
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_rank_takes_its_peer_along(start: Start, rank: int) -> None:
    world = start(2)
    info = world.wait_ready()
    os.kill(info.ranks[rank].pid, signal.SIGKILL)
    assert world.process.wait(10) != 0
    wait_until(lambda: not any(alive(rank.pid) for rank in info.ranks), 5, "the ranks' end")


def test_ranks_end_when_their_supervisor_is_gone(start: Start) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        world = start(2, "--supervisor-pid", str(supervisor.pid))
        info = world.wait_ready()
        supervisor.kill()
    wait_until(lambda: not any(alive(rank.pid) for rank in info.ranks), 10, "the ranks' end")
    assert f"the supervisor (pid {supervisor.pid}) is gone" in world.said


def test_a_bad_checkpoint_is_one_line_for_people_and_for_the_supervisor(start: Start, folder: Path) -> None:
    world = start(2, model=folder / "nothing-here")
    assert world.process.wait(60) != 0
    assert "Traceback" not in world.said
    assert read_rank(world.run_dir, 0, 1) is not None
    words = [error_file(world.run_dir, rank, 1) for rank in range(2)]
    told = [file.read_text().splitlines()[0] for file in words if file.exists()]
    assert told
    assert all("nothing-here" in line for line in told)
