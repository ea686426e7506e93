"""The hosts that a world may use: all at first, those that are left after a loss, and all again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allspan.launch.hosts import fleet as fleet_module
from allspan.launch.hosts.fleet import Fleet
from allspan.launch.hosts.host_list import Host, HostsConfig
from allspan.launch.hosts.messages import HostLost
from allspan.launch.hosts.remote_shell import RemoteShell
from allspan.protos.api.errors import Unavailable
from support.waiting import wait_until

HERE, THERE = Host("a", 2), Host("b", 2)
SHELL = '#!/bin/sh\ncd "$(dirname "$0")"; echo $$ > pid; test -e off && exec sleep 60; shift; exec sh -c "exec $*"\n'


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Both hosts are this machine; while the file "off" is there, b does not answer."""
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    made = Fleet((HERE, THERE), HostsConfig(("a:2", "b:2")), RemoteShell("test", (str(shell),)))
    yield made
    made.close()


def test_a_host_that_stays_away_is_left_out_and_used_again_when_it_answers(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet.connect()
    assert fleet.used == (HERE, THERE)
    (tmp_path / "off").touch()
    lose(fleet, tmp_path)
    began = time.monotonic()
    fleet.connect(1)
    assert fleet.used == (HERE,)
    assert time.monotonic() - began < 2.0
    assert "the ranks start on the hosts left, a:2: host b does not answer" in capfd.readouterr().err
    monkeypatch.setattr(fleet_module, "CONNECT_TIMEOUT_S", 0.1)
    with pytest.raises(Unavailable, match="host b does not answer"):
        fleet.connect(2)  # as many as there are: none may be missing
    (tmp_path / "off").unlink()
    message = lose(fleet, tmp_path)
    assert not fleet.is_lost(message), "a host that is not used ends no world"
    monkeypatch.setattr(fleet_module, "RETURN_WAIT_S", 20.0)
    fleet.connect(1)
    assert fleet.used == (HERE, THERE)


def test_the_end_does_not_wait_for_a_host_that_does_not_answer(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "off").touch()
    monkeypatch.setattr(fleet_module, "CONNECT_TIMEOUT_S", 0.1)
    with pytest.raises(Unavailable, match="does not answer"):
        fleet.connect()
    began = time.monotonic()
    fleet.close()
    assert time.monotonic() - began < 3.0


def lose(fleet: Fleet, folder: Path) -> HostLost:
    """Kills what the remote shell has started last."""
    wait_until(lambda: (folder / "pid").exists(), what="a shell")
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    lost: list[HostLost] = []

    def is_told() -> bool:
        while not fleet.messages.empty():
            if isinstance(message := fleet.messages.get(), HostLost):
                lost.append(message)
        return bool(lost)

    wait_until(is_told, 5.0, "the loss")
    return lost[0]
