"""A keeper on another host, over a network that is cut, and a host that freezes or loses its power."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allspan.launch.hosts import rank_shell
from allspan.launch.hosts.link import HostLink, keeper_command
from allspan.launch.hosts.messages import Facts, HostLost, Message, RankExit, RankStarted
from support.network_hosts import Host, Hosts, network_hosts
from support.waiting import wait_until

HOST_TIMEOUT_S = 1.5
PORT = 7070
RUN_DIR = f"/tmp/allspan-{os.getuid()}/cut"
SHM = f"/dev/shm/allspan-{os.getuid()}-cut"
# A remote shell without manners: the keeper has a connection's socket as its input and its output, as under sshd.
SERVER = f"""
import os, socket, sys
server = socket.create_server(("", {PORT}))
connection, _ = server.accept()
for number in (0, 1):
    os.dup2(connection.fileno(), number)
os.execvp(sys.argv[1], sys.argv[1:])
"""
CLIENT = f"""
import os, socket, sys, threading
for _ in range(200):
    try:
        connection = socket.create_connection((sys.argv[1], {PORT}))
        break
    except ConnectionRefusedError:
        threading.Event().wait(0.05)
def send():
    while data := os.read(0, 65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := connection.recv(65536):
    os.write(1, data)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with network_hosts(2) as hosts:
        yield hosts


class Keeper:
    """The keeper on the second host, one rank of it, and the first host's link to it."""

    def __init__(self, near: Host, far: Host) -> None:
        self.far = far
        self.messages: queue.Queue[Message] = queue.Queue()
        self.server = far.popen([sys.executable, "-S", "-c", SERVER, *keeper_command()])
        words = ["nsenter", "-t", str(near.init), "-n", "--", sys.executable, "-S", "-c", CLIENT, far.address]
        self.link = HostLink(far.name, words, self.messages.put, HOST_TIMEOUT_S)
        self.link.start()
        facts = self.wait(Facts)
        assert isinstance(facts, Facts)
        assert far.address in [address.address for address in facts.addresses]
        assert facts.host == far.name
        begin = {"do": "begin", "run_dir": RUN_DIR, "shm": SHM, "host_timeout": HOST_TIMEOUT_S, "supervisor_epoch": 1}
        self.link.ask(begin, 10)
        script = str(Path(rank_shell.__file__))
        self.rank = far.popen([sys.executable, "-S", "-E", script, f"{RUN_DIR}/exit-1.e1", "sleep", "1000"])
        started = self.wait(RankStarted)
        assert isinstance(started, RankStarted)
        self.pid = started.pid

    def wait(self, kind: type[Message], timeout_s: float = 15.0) -> Message:
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.messages.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message

    def is_nothing_left(self) -> bool:
        for process in (self.rank, self.server):
            process.poll()
        return not self.far.processes() and self.far.run(["ls", RUN_DIR, SHM], check=False).stdout == ""

    def close(self) -> None:
        self.link.close(1.0)
        for process in (self.rank, self.server):
            process.kill()
            process.wait()


@pytest.fixture
def keeper(hosts: Hosts) -> Iterator[Keeper]:
    keeper = Keeper(hosts[0], hosts[1])
    yield keeper
    keeper.close()


@pytest.mark.alone
def test_a_remote_rank_killed_is_told_within_half_a_second(keeper: Keeper) -> None:
    begun = time.monotonic()
    keeper.far.run(["kill", "-9", str(keeper.pid)])
    death = keeper.wait(RankExit, 2)
    assert time.monotonic() - begun < 0.5
    assert isinstance(death, RankExit)
    assert (death.host, death.rank, death.signal) == (keeper.far.name, 1, 9)


@pytest.mark.parametrize(
    ("cut", "mend"),
    [
        (Host.unplug, Host.plug),
        (Host.mute, lambda host: host.mute(False)),
        (Host.deafen, lambda host: host.deafen(False)),
    ],
    ids=["both ways", "from it", "to it"],
)
def test_a_host_that_is_cut_off_is_lost_and_ends_its_ranks_itself(
    keeper: Keeper, cut: Callable[[Host], None], mend: Callable[[Host], None]
) -> None:
    begun = time.monotonic()
    cut(keeper.far)
    try:
        lost = keeper.wait(HostLost, HOST_TIMEOUT_S + 1)
        assert isinstance(lost, HostLost)
        assert lost.host == keeper.far.name
        assert "nothing was heard of it for 1.5 s" in lost.cause
        # Where its own packets alone are lost it still hears the supervisor, until that one hangs up.
        left_s = HOST_TIMEOUT_S + 1 + begun - time.monotonic()
        wait_until(keeper.is_nothing_left, left_s, what="the fence")
    finally:
        mend(keeper.far)


def test_a_frozen_host_is_lost_and_ends_its_ranks_once_it_goes_on(keeper: Keeper) -> None:
    keeper.far.signal_all(19)
    lost = keeper.wait(HostLost, HOST_TIMEOUT_S + 1)
    assert isinstance(lost, HostLost)
    keeper.far.signal_all(18)
    wait_until(keeper.is_nothing_left, HOST_TIMEOUT_S + 1, what="the fence")
