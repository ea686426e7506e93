"""`kill -9` of a rank on a GPU, under load: who is told what, how soon, and that the GPU's memory is free afterwards.

Nobody else may use the GPUs meanwhile. Ranks have a GPU each where there are enough, else they share one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import AllspanError, Unavailable
from support.serving import Served, runtime_folder
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = "cuda"
ENDLESS = SamplingParams(max_tokens=30000, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.7, seed=1, ignore_eos=True)
NOT_READY_S, TOLD_S, DOWN_S = 2.0, 3.0, 10.0
SLACK_MIB = 64
"""What the driver keeps for itself varies."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a cluster with random weights; token ids are all that it knows."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    made: list[Served] = []
    flags = (
        f"--device={DEVICE}",
        "--random-weights",
        "--no-gateway",
        "--oversubscribe",
        "--threads=1",
        "--max-num-seqs=32",
        "--max-num-batched-tokens=1024",
        "--kv-cache-bytes=1500000000",
    )

    with runtime_folder() as runtime:

        def begin(*more: str) -> Served:
            made.append(Served(folder, *flags, *more, runtime=runtime))
            return made[-1].wait_ready()

        yield begin
        for served in made:
            served.kill()
            print(served.log)  # shown when the test fails


class Load:
    """Requests that come and go, from a thread of its own, until the engine is lost."""

    def __init__(self, engine: ClientEngine) -> None:
        self._engine = engine
        self.finished = 0
        self.errors: list[AllspanError] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.errors:
            prompts = [[3 + (self.finished + i) % 90] * (1 + 67 * i) for i in range(8)]
            try:
                self.finished += len(self._engine.generate(prompts, SHORT))
            except AllspanError as error:
                self.errors.append(error)

    def join(self) -> AllspanError:
        self._thread.join(TOLD_S)
        assert not self._thread.is_alive(), "a request was not told"
        return self.errors[0]


def used_mib() -> int:
    if DEVICE == "cpu":
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return sum(map(int, run.stdout.split()))


def kill(served: Served, rank: int) -> tuple[int, float]:
    """The victim's process, and when it was killed."""
    victim = served.rank_pid(rank)
    os.kill(victim, signal.SIGKILL)
    return victim, time.monotonic()


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_killed_rank_is_named_to_every_request_and_its_memory_is_free(start: Start, ranks: int, rank: int) -> None:
    before = used_mib()
    served = start("--no-restart", f"--ranks={ranks}")
    traces = served.traces()
    with ClientEngine(attach=served.run_dir, resume=False) as engine:
        load = Load(engine)
        queues = [engine.start_request([5 + i, 6, 7], ENDLESS)[1] for i in range(12)]
        for queue in queues:
            assert queue.get(timeout=60) is not None
        wait_until(lambda: load.finished >= 16, 60.0, "load")
        assert DEVICE == "cpu" or used_mib() - before > 1000 * ranks
        victim, killed = kill(served, rank)
        wait_until(lambda: not engine.is_ready, NOT_READY_S, "an engine that is not ready")
        errors = [load.join()]
        for queue in queues:
            with pytest.raises(Unavailable) as caught:
                list(iter(partial(queue.get, timeout=10), None))
            errors.append(caught.value)
        assert time.monotonic() - killed < TOLD_S
    for error in errors:
        assert f"rank {rank} (pid {victim}" in error.message
        assert "signal 9" in error.message
    traces.assert_gone(within=DOWN_S - (time.monotonic() - killed))
    wait_until(lambda: used_mib() <= before + SLACK_MIB, DOWN_S, f"{before} MiB of the GPUs in use, as before")
    assert served.wait_exit(5.0) == 1


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 3000), (2, 400)])
def test_the_next_world_has_the_memory_of_the_one_before_and_its_requests(
    start: Start, ranks: int, tokens: int
) -> None:
    """Twice: what a dead rank left would add up. Ranks that share a GPU take turns at it, milliseconds each."""
    before = used_mib()
    served = start(f"--ranks={ranks}")
    with ClientEngine(attach=served.run_dir, resume_timeout=120.0) as engine:
        engine.generate([[5, 6, 7]], SHORT)
        held = used_mib()
        for epoch in (2, 3):
            _, queue = engine.start_request([5, 6, 7], ENDLESS.with_(max_tokens=tokens))
            first = queue.get(timeout=60)
            assert first is not None
            kill(served, ranks - 1)
            rest = list(iter(partial(queue.get, timeout=120), None))
            assert sum(len(output.token_ids) for output in (first, *rest)) == tokens, "none is missing, none came twice"
            assert engine.cluster.epoch == epoch
            wait_until(lambda: used_mib() <= held + SLACK_MIB, DOWN_S, "as much memory in use as before the fault")
    assert served.ask_to_end() == 0
    wait_until(lambda: used_mib() <= before + SLACK_MIB, DOWN_S, "free memory of the GPUs")
