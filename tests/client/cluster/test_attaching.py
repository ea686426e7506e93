"""Attaching to a cluster of fake ranks, letting go of it, and what the client imports."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import (
    ConfigError,
    ModelNotFound,
    RequestCancelled,
    Unavailable,
)
from support.fake_worker import FakeCluster
from support.waiting import wait_until


def test_closing_ends_open_requests_and_is_idempotent(cluster: FakeCluster) -> None:
    cluster.paused = True
    engine = ClientEngine(attach=cluster.run_dir)
    _, queue = engine.start_request([1])
    engine.close()
    engine.close()
    with pytest.raises(RequestCancelled):
        queue.get(timeout=1)
    with pytest.raises(Unavailable, match="closed"):
        engine.start_request([1])
    wait_until(lambda: sum(event[0] == "unsubscribe" for event in cluster.events) == 2, what="the end of the leases")


def test_an_engine_that_is_forgotten_gives_back_its_leases(cluster: FakeCluster) -> None:
    engine = ClientEngine(attach=cluster.run_dir)
    assert engine.is_ready
    del engine
    wait_until(lambda: sum(event[0] == "unsubscribe" for event in cluster.events) == 2, what="the end of the leases")


def test_an_engine_that_is_collected_on_its_own_thread_gives_back_its_leases(cluster: FakeCluster) -> None:
    """Cycles are collected on whichever thread allocates next."""

    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.engine = holder, ClientEngine(attach=cluster.run_dir)  # type: ignore[attr-defined]
    loop = holder.engine._loop  # type: ignore[attr-defined]

    async def collect() -> int:
        return gc.collect()

    gc.disable()
    try:
        del holder
        assert loop.run(collect()) > 0
    finally:
        gc.enable()
    wait_until(lambda: sum(event[0] == "unsubscribe" for event in cluster.events) == 2, what="the end of the leases")


def test_it_attaches_by_directory_by_file_and_by_addresses(cluster: FakeCluster) -> None:
    unix_paths = [address.removeprefix("unix:") for address in cluster.addresses]
    for attach in (str(cluster.run_dir), cluster.run_dir / "cluster.json", cluster.addresses, unix_paths):
        with ClientEngine(attach=attach) as engine:
            assert engine.generate([1], SamplingParams(max_tokens=1))[0].token_ids == (2,)
            assert (engine.model, engine.max_model_len, len(engine.cluster.ranks)) == ("fake", 256, 2)
            assert engine.cluster.adapters == cluster.adapters


def test_wrong_places_to_attach_to_are_refused_at_once(cluster: FakeCluster, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match="no cluster to attach to"):
        ClientEngine(attach=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="attach has 1 addresses, the world has 2 ranks"):
        ClientEngine(attach=cluster.addresses[:1])
    with pytest.raises(ConfigError, match=r"attach\[0\] \(unix:.*\) is rank 1; give the addresses in order of rank"):
        ClientEngine(attach=cluster.addresses[::-1])
    with pytest.raises(Unavailable, match=r"no rank answers at unix:.*nobody"):
        ClientEngine(attach=[f"unix:{tmp_path}/nobody"], startup_timeout=0)
    with pytest.raises(ConfigError, match="either a model"):
        ClientEngine()
    with pytest.raises(ConfigError, match="ranks"):
        ClientEngine(attach=cluster.run_dir, ranks=2)
    assert time.monotonic() - started < 10


def test_ranks_that_do_not_answer_yet_are_waited_for(cluster: FakeCluster, tmp_path: Path) -> None:
    """As when they are started by hand, on a machine that is busy."""
    address = tmp_path / "late.sock"
    where = [f"unix:{address}", cluster.addresses[1]]
    started = time.monotonic()
    with pytest.raises(
        Unavailable, match=r"no rank answers at unix:.*late.*\(waited 0\.6 s for the ranks to answer; startup_timeout="
    ):
        ClientEngine(attach=where, startup_timeout=0.6)
    assert time.monotonic() - started >= 0.6
    threading.Timer(0.5, lambda: address.symlink_to(cluster.addresses[0].removeprefix("unix:"))).start()
    with ClientEngine(attach=where, startup_timeout=60) as engine:
        assert engine.generate([1], SamplingParams(max_tokens=1))[0].token_ids == (2,)


def test_a_model_that_cannot_be_read_here_still_takes_token_ids(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.model_path = "/not/on/this/machine"
    cluster.write("ready")
    with ClientEngine(attach=cluster.run_dir) as engine:
        (result,) = engine.generate([1], SamplingParams(max_tokens=2))
        assert (result.token_ids, result.text) == ((2, 3), "")
        for prompt, params in (("text", SamplingParams()), ([1], SamplingParams(stop=("x",)))):
            with pytest.raises(ModelNotFound, match=r"/not/on/this/machine.*tokenizer=PATH"):
                engine.generate(prompt, params)
    with ClientEngine(attach=cluster.run_dir, tokenizer=tmp_path / "model") as engine:
        assert engine.generate("A", SamplingParams(max_tokens=1))[0].text == "B"


def test_importing_the_client_brings_neither_torch_nor_grpc_nor_mpi() -> None:
    code = (
        "import sys; from allspan import ClientEngine, SamplingParams; "
        "print([m for m in ('torch', 'grpc', 'mpi4py', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_using_the_client_brings_no_torch(cluster: FakeCluster) -> None:
    code = (
        "import sys; from allspan import ClientEngine, SamplingParams\n"
        f"with ClientEngine(attach={str(cluster.run_dir)!r}) as engine:\n"
        "    print(engine.generate('A', SamplingParams(max_tokens=2))[0].text)\n"
        "print([m for m in ('torch', 'mpi4py', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["BC", "[]"]


def test_a_program_that_ends_without_closing_ends_in_time(cluster: FakeCluster) -> None:
    code = f"from allspan import ClientEngine; engine = ClientEngine(attach={str(cluster.run_dir)!r}); print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
    wait_until(lambda: sum(event[0] == "unsubscribe" for event in cluster.events) == 2, what="the end of the leases")
