"""A bad network between a facade and a rank: slower within the budget, an error beyond it, never two epochs mixed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.cluster_file import ClusterInfo, read_cluster, write_cluster
from support.fault_facade import Facade
from support.fault_hosts import Network, network
from support.fault_relay import Relay
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

PROMPT = [1, 2, 3]
RankOn = Callable[..., ClusterInfo]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture
def rank_on(model: Path, runtime: Path) -> Iterator[RankOn]:
    """Starts a world of one rank that listens on TCP, on a host if words for that are given; its cluster file."""
    with ExitStack() as stack:

        def begin(epoch: int = 1, wrap: Sequence[str] = ()) -> ClusterInfo:
            run_dir = runtime / f"world-{epoch}"
            words = ["--model", str(model), "--run-dir", str(run_dir), "--host=127.0.0.1", f"--epoch={epoch}"]
            limits = ["--max-num-seqs=4", "--kv-cache-bytes=100000000", "--watchdog-timeout=1"]
            rank = subprocess.Popen([*wrap, sys.executable, "-m", "allspan.worker", *words, *limits])
            stack.callback(rank.wait, 10.0)
            stack.callback(rank.terminate)

            def is_ready() -> bool:
                assert rank.poll() is None
                try:
                    return read_cluster(run_dir).state == "ready"
                except ConfigError:
                    return False

            wait_until(is_ready, 60.0, "a rank that is ready")
            return read_cluster(run_dir)

        yield begin


def tell(run_dir: Path, info: ClusterInfo, address: str) -> Path:
    """A cluster file of `info`, with its rank at `address`."""
    run_dir.mkdir(exist_ok=True)
    write_cluster(run_dir, replace(info, ranks=(replace(info.ranks[0], address=address),)))
    return run_dir


def port(info: ClusterInfo) -> int:
    return int(info.ranks[0].address.rpartition(":")[2])


def test_delay_loss_and_resets_make_it_slower_and_change_no_token(rank_on: RankOn, runtime: Path) -> None:
    """200 ms each way with 2 % loss, and then a reset in the middle of an answer."""
    info = rank_on()
    with ClientEngine(attach=info.ranks[0].address) as engine:
        expected = engine.generate([PROMPT], greedy(2000))[0].token_ids
    relay = Relay(port(info))
    try:
        with ClientEngine(attach=tell(runtime / "seen", info, relay.address)) as engine:
            relay.delay(0.2, 0.02)
            started = time.monotonic()
            assert engine.generate([PROMPT], greedy(100))[0].token_ids == expected[:100]
            assert time.monotonic() - started > 0.4  # there and back
            relay.delay(0.0, 0.0)
            _, queue = engine.start_request(PROMPT, greedy(2000))
            first = queue.get(timeout=30)
            assert first is not None
            relay.reset()
            tokens = [*first.token_ids, *(token for output in queue for token in output.token_ids)]
            assert tokens == list(expected)
    finally:
        relay.close()


def test_a_partition_is_waited_for_within_the_budget_and_beyond_it_no_epochs_mix(
    rank_on: RankOn, runtime: Path
) -> None:
    """Facade and rank on hosts of their own. The budget is the watchdog's time (1 s) and five seconds more."""
    with network() as net, ExitStack() as stack:
        old = rank_on(1, net.on(1))
        seen = tell(runtime / "seen", old, _from_here_to_there(stack, net, port(old)))
        facade = Facade(seen, net.on(0))
        stack.callback(facade.close)

        facade.start(500)
        wait_until(lambda: facade.ends, 60.0, "an answer")
        expected = facade.tokens
        assert len(expected) == 500
        facade.start(60000)
        wait_until(lambda: len(facade.tokens) > 600, 30.0, "tokens")
        net.unplug()
        count = _count_of_a_quiet_line(facade)
        net.plug()
        wait_until(lambda: len(facade.tokens) > max(count, 1000), 30.0, "more tokens after a short partition")
        assert facade.tokens[500:1000] == expected
        assert len(facade.ends) == 1

        net.unplug()
        cut = time.monotonic()
        wait_until(lambda: len(facade.ends) == 2, 15.0, "an end")
        assert facade.ends[1]["error"] == "Unavailable"
        assert "sent nothing for 6 s" in facade.ends[1]["message"]
        assert time.monotonic() - cut < 12.0

        # The old world lives on behind the partition, and a new one is announced: only that one may be heard.
        new = rank_on(2, net.on(1))
        tell(seen, new, _from_here_to_there(stack, net, port(new)))
        count = len(facade.tokens)
        net.plug()
        _start_until_it_answers(facade)
        assert facade.tokens[-500:] == expected
        assert len(facade.tokens) == count + 500
        assert facade.events[-1] == {"end": "finished"}
        assert [event["epoch"] for event in facade.events if "epoch" in event][-1] == 2


def _from_here_to_there(stack: ExitStack, net: Network, rank_port: int) -> str:
    """An address on the facade's host, whose other end is a rank on the other one: without certificates neither facade
    nor rank leaves its own."""
    there = Relay(rank_port, net.addresses[1], net.on(1))
    stack.callback(there.close)
    far_port = int(there.address.rpartition(":")[2])
    here = Relay(far_port, "127.0.0.1", net.on(0), net.addresses[1])
    stack.callback(here.close)
    return here.address


def _count_of_a_quiet_line(facade: Facade) -> int:
    """Tokens once none has come for a second, which must be soon."""
    count, since, deadline = len(facade.tokens), time.monotonic(), time.monotonic() + 5.0
    while time.monotonic() - since < 1.0:
        assert time.monotonic() < deadline, "tokens come through a partition"
        if (now := len(facade.tokens)) != count:
            count, since = now, time.monotonic()
        time.sleep(0.01)
    return count


def _start_until_it_answers(facade: Facade) -> None:
    """Requests are refused with Unavailable until the facade has found the new world."""
    deadline = time.monotonic() + 30.0
    while facade.ends[-1].get("end") != "finished" or len(facade.ends) < 3:
        assert time.monotonic() < deadline, facade.ends
        ended = len(facade.ends)
        facade.start(500)
        wait_until(lambda: len(facade.ends) > ended, 30.0, "an end")  # noqa: B023
        assert facade.ends[-1].get("error", "Unavailable") == "Unavailable"
