"""Ranks on several hosts: the same tokens as on one, the first cause of a failure told, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.byte_model import save_byte_model
from support.network_hosts import Hosts, network_hosts
from support.sshd import sshd
from support.waiting import wait_until

PROMPT = "The ranks of this model are on two hosts, and"


@dataclass
class Served:
    """`allspan serve` on the first of some hosts."""

    hosts: Hosts
    process: subprocess.Popen[str]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def cluster(self) -> dict[str, Any]:
        folder = self.log.partition("run directory ")[2].split()[0]
        info: dict[str, Any] = json.loads(self.hosts[0].run(["cat", f"{folder}/cluster.json"]).stdout)
        return info

    def generate(self) -> str:
        url = self.log.partition("HTTP ")[2].split()[0].rstrip(",")
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        program = "import sys, urllib.request as u; r = u.Request(sys.argv[1], sys.argv[2].encode(), "
        program += "{'Content-Type': 'application/json'}); print(u.urlopen(r, timeout=60).read().decode())"
        words = [sys.executable, "-c", program, f"{url}/completions", json.dumps(body)]
        text: str = json.loads(self.hosts[0].run(words, timeout=90).stdout)["choices"][0]["text"]
        return text


@contextmanager
def served(hosts: Hosts, folder: Path, listed: str, *flags: str, ssh: Path | None = None) -> Iterator[Served]:
    """`ssh`: the folder of a program of that name, which takes the place of the hosts' own remote shell."""
    log_file = folder / f"serve-{time.monotonic_ns()}.log"
    words = [sys.executable, "-m", "allspan.launch.cli", "serve", str(folder / "model"), "--port=0", "--grpc-port=0"]
    words += ["--hosts", listed, "--mpi-network", hosts.network]
    words += ["--remote-shell", "ssh" if ssh else str(hosts.remote_shell)]
    words += ["--threads=1", "--oversubscribe", "--served-model-name=tiny", "--max-model-len=128", *flags]
    env = {**os.environ, "PYTHONPATH": os.path.abspath(os.environ.get("PYTHONPATH", "")), "XDG_RUNTIME_DIR": ""}
    env["PATH"] = os.pathsep.join(filter(None, [str(ssh or ""), os.environ["PATH"]]))
    with log_file.open("w") as log, hosts[0].popen(words, stdout=log, stderr=log, text=True, env=env) as process:
        found = Served(hosts, process, log_file)
        try:
            wait_until(lambda: "Server is ready" in found.log or process.poll() is not None, 120, "a ready server")
            assert process.poll() is None, found.log
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                process.kill()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with network_hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hosts")
    save_byte_model(made / "model")
    return made


@pytest.fixture(scope="module")
def expected(hosts: Hosts, folder: Path) -> str:
    """What two ranks on one host generate."""
    with served(hosts, folder, f"{hosts[0].name}:2") as one:
        return one.generate()


@pytest.mark.parametrize("shell", ["namespaces", pytest.param("ssh", marks=pytest.mark.nightly)])
def test_two_hosts_give_the_tokens_of_one_and_a_killed_rank_is_told(
    shell: str, hosts: Hosts, folder: Path, expected: str, tmp_path: Path
) -> None:
    first, second = hosts
    with ExitStack() as stack:
        ssh = stack.enter_context(sshd(second, tmp_path)) if shell == "ssh" else None
        two = stack.enter_context(served(hosts, folder, f"{first.name},{second.name}", ssh=ssh))
        ranks = two.cluster()["ranks"]
        assert [rank["host"] for rank in ranks] == [first.name, second.name]
        assert [rank["address"].rpartition(":")[0] for rank in ranks] == [first.address, second.address]
        assert two.generate() == expected
        second.run(["sh", "-c", f"kill -9 {ranks[1]['pid']}"])
        told = f"rank 1 (pid {ranks[1]['pid']} on {second.name}) was killed by signal 9 (SIGKILL)"
        wait_until(lambda: told in two.log, 10, f"{told!r} in {two.log}")
        wait_until(lambda: "is ready again (epoch 2)" in two.log, 60, "another world")
        assert two.generate() == expected
    wait_until(lambda: not first.processes() and not second.processes(), 5, "the end of all processes")
    for host in hosts:
        left = host.run(["sh", "-c", "ls -A /dev/shm; ls /tmp/allspan-$(id -u)"]).stdout
        assert not left


@pytest.mark.nightly
def test_a_host_reached_by_ssh_that_is_cut_off_ends_its_ranks(hosts: Hosts, folder: Path, tmp_path: Path) -> None:
    first, second = hosts
    with sshd(second, tmp_path) as ssh, served(hosts, folder, f"{first.name},{second.name}", ssh=ssh) as two:
        assert "Accepted publickey" in (tmp_path / "sshd.log").read_text()
        second.unplug()
        told = f"host {second.name} was lost: nothing was heard of it for 3 s"
        wait_until(lambda: told in two.log, 10, told)
        # sshd's own sessions last until it misses their clients, by its ClientAliveInterval.
        wait_until(lambda: all(process.command.startswith("sshd:") for process in second.processes()), 3, "our end")
        assert not second.run(["sh", "-c", "ls -A /dev/shm; ls /tmp/allspan-$(id -u)"]).stdout
        second.plug()


def test_a_frozen_host_is_lost_and_is_used_again_when_it_is_back(hosts: Hosts, folder: Path) -> None:
    first, second = hosts
    with served(hosts, folder, f"{first.name},{second.name}", "--host-timeout=2", "--min-hosts=2") as two:
        expected = two.generate()
        old = {process.pid for process in second.processes()}
        second.signal_all(signal.SIGSTOP)
        told = f"host {second.name} was lost: nothing was heard of it for 2 s"
        wait_until(lambda: told in two.log, 10, told)
        second.signal_all(signal.SIGCONT)
        wait_until(lambda: not old & {process.pid for process in second.processes()}, 5, "the fence")
        wait_until(lambda: "is ready again" in two.log, 60, "another world")
        assert two.generate() == expected
    wait_until(lambda: not first.processes() and not second.processes(), 5, "the end of all processes")


def test_stages_on_two_hosts_make_the_tokens_of_one_rank_and_a_killed_stage_is_told(hosts: Hosts, folder: Path) -> None:
    first, second = hosts
    with served(hosts, folder, f"{first.name}:1") as one:
        expected = one.generate()
    with served(hosts, folder, f"{first.name},{second.name}", "-pp=2") as two:
        ranks = two.cluster()["ranks"]
        assert [rank["host"] for rank in ranks] == [first.name, second.name]
        assert two.generate() == expected
        second.run(["sh", "-c", f"kill -9 {ranks[1]['pid']}"])
        told = f"rank 1 (pid {ranks[1]['pid']} on {second.name}) was killed by signal 9 (SIGKILL)"
        wait_until(lambda: told in two.log, 10, f"{told!r} in {two.log}")
