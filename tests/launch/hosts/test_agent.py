"""`allspan agent` and `allspan rsh`: as ssh behaves, and what happens when either end, or the link, is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allspan.launch.certificates import make_certificates
from allspan.launch.hosts.agent.client import LOST, Streams, execute
from allspan.launch.hosts.agent.endpoint import AgentConfig
from allspan.launch.hosts.agent.heartbeats import Liveness
from allspan.launch.hosts.agent.server import AgentServer, AgentService
from allspan.launch.supervision.mpi import identify
from allspan.protos.api.errors import ConfigError
from support.mpirun import find_mpirun, mpi_environment
from support.network_hosts import Host, Hosts, network_hosts
from support.waiting import wait_until

ALLSPAN = (sys.executable, "-m", "allspan.launch.cli")
FILES = {"ca-certs": "ca.pem", "certfile": "agent.pem", "keyfile": "agent.key"}
OTHER_SERVER = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, ["127.0.0.1"])
    return folder


def config_with(folder: Path, port: int = 0, **changes: Any) -> AgentConfig:
    files = {"agent_ssl_ca_certs": "ca.pem", "agent_ssl_certfile": "agent.pem", "agent_ssl_keyfile": "agent.key"}
    return AgentConfig(port, **({name: str(folder / file) for name, file in files.items()} | changes))


@contextmanager
def agent(config: AgentConfig, **service: Any) -> Iterator[int]:
    server = AgentServer(AgentService(config, lambda text: None, **service), "127.0.0.1", config)
    try:
        yield server.port
    finally:
        server.stop()


class Ran:
    """What became of a command: its status, output, and what the client said."""

    def __init__(self, command: str, config: AgentConfig, stdin: bytes = b"", clock: Any = time.time) -> None:
        self.said: list[str] = []
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        os.pwrite(files[0], stdin, 0)
        streams = Streams(files[0], files[1], files[2], self.said.append, clock)
        self.status = execute("127.0.0.1", command, {"WORD": "given"}, config, streams)
        self.stdin, self.stdout, self.stderr = (os.pread(file, 1 << 24, 0) for file in files)
        for file in files:
            os.close(file)


def test_streams_environment_and_exit_status_are_the_commands(certificates: Path) -> None:
    with agent(config_with(certificates)) as port:
        config = config_with(certificates, port)
        ran = Ran('echo "$WORD  here"; echo bad >&2; exit 3', config)
        assert (ran.status, ran.stdout, ran.stderr, ran.said) == (3, b"given  here\n", b"bad\n", [])
        data = os.urandom(3_000_000)
        assert Ran("cat", config, data).stdout == data
        assert Ran("kill -9 $$", config).status == 128 + signal.SIGKILL
        assert Ran("no-such-command", config).status == 127
        assert Ran("exec <&-; sleep 0.1", config, data).status == 0


def test_who_may_not_come_in_is_told_why(certificates: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"])
    with agent(config_with(certificates)) as port:

        def said(**changes: Any) -> str:
            ran = Ran("true", config_with(certificates, **{"port": port} | changes))
            assert ran.status == LOST
            return ran.said[0]

        client = {"agent_ssl_certfile": "client.pem", "agent_ssl_keyfile": "client.key"}
        assert "is for 'allspan client'" in said(**{name: str(certificates / file) for name, file in client.items()})
        stranger = {"agent_ssl_certfile": "agent.pem", "agent_ssl_keyfile": "agent.key"}
        assert "refuses the certificate" in said(**{name: str(tmp_path / file) for name, file in stranger.items()})
        assert "shows is refused" in said(agent_ssl_ca_certs=str(tmp_path / "ca.pem"))
        assert "no agent listens" in said(port=1)
    server = subprocess.Popen(
        [sys.executable, "-c", OTHER_SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with server:
        assert server.stdout is not None
        assert "is no allspan agent" in said(port=int(server.stdout.readline()))
        server.kill()


def test_the_program_tells_a_refusal_in_one_line(certificates: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"])
    flags = [f"--agent-ssl-{name}={tmp_path / file}" for name, file in FILES.items()]
    with agent(config_with(certificates)) as port:
        words = [*ALLSPAN, "rsh", f"--agent-port={port}", *flags, "127.0.0.1", "true"]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (LOST, "")
    (line,) = ran.stderr.splitlines()
    assert "shows is refused" in line


def test_another_version_is_refused_and_another_time_is_told(certificates: Path) -> None:
    with agent(config_with(certificates), version="9.9") as port:
        ran = Ran("true", config_with(certificates, port))
        assert ran.status == LOST
        assert "is allspan 9.9, the client 0." in ran.said[0]
    with agent(config_with(certificates)) as port:
        ran = Ran("true", config_with(certificates, port), clock=lambda: time.time() + 3600)
        assert ran.status == 0
        assert "3600 s behind this host's" in ran.said[0]


def test_an_open_address_without_certificates_is_refused() -> None:
    config = AgentConfig(0)
    with pytest.raises(ConfigError, match=r"--agent-host is 0\.0\.0\.0"):
        AgentServer(AgentService(config, print), "0.0.0.0", config)
    with pytest.raises(ConfigError, match="with TLS only"):
        execute("10.77.1.2", "true", {}, config, Streams(0, 1, 2, print))


def test_silence_counts_only_while_this_process_runs() -> None:
    now = [0.0]
    liveness = Liveness(lambda: now[0])
    for now[0] in (0.5, 1.0, 1.4):
        assert not liveness.is_silent(1.5)
    now[0] = 30.0
    assert not liveness.is_silent(1.5)
    for now[0], silent in ((30.8, False), (31.4, False), (31.6, True)):
        assert liveness.is_silent(1.5) is silent
    liveness.heard()
    assert not liveness.is_silent(1.5)


def environment(folder: Path) -> dict[str, str]:
    return mpi_environment(folder) | {
        "ALLSPAN_AGENT_SSL_CA_CERTS": str(folder / "ca.pem"),
        "ALLSPAN_AGENT_SSL_CERTFILE": str(folder / "agent.pem"),
        "ALLSPAN_AGENT_SSL_KEYFILE": str(folder / "agent.key"),
        "ALLSPAN_HOST_TIMEOUT": "1",
    }


def start_agent(host: Host, env: dict[str, str], log: Path) -> subprocess.Popen[Any]:
    with log.open("wb") as file:
        process = host.popen([*ALLSPAN, "agent", "--agent-host", "0.0.0.0"], env=env, stderr=file)
    wait_until(lambda: b"listens" in log.read_bytes(), 30, "the agent")
    return process


@contextmanager
def hosts_with_an_agent(tmp_path: Path) -> Iterator[tuple[Hosts, dict[str, str]]]:
    with network_hosts(2) as hosts:
        make_certificates(tmp_path, [host.name for host in hosts])
        env = environment(tmp_path)
        with start_agent(hosts[1], env, tmp_path / "agent.log") as process:
            try:
                yield hosts, env
            except BaseException:
                process.kill()
                raise
            process.terminate()
            assert process.wait(10) == 128 + signal.SIGTERM


def commands(host: Host) -> list[str]:
    return [process.command for process in host.processes() if process.command.startswith("sleep 4")]


def test_a_command_and_its_daemons_end_with_the_client_and_with_the_link(tmp_path: Path) -> None:
    with hosts_with_an_agent(tmp_path) as ((a, b), env):
        words = [*ALLSPAN, "rsh", b.name, "trap '' TERM; sleep 401 & setsid sleep 402 & sleep 403"]
        for end in ("client", "link", "one way"):
            rsh = a.popen(words, env=env, stdin=subprocess.DEVNULL, stderr=-1, text=True)
            wait_until(lambda: len(commands(b)) == 3, 20, "the command")
            begun = time.monotonic()
            if end == "client":
                rsh.kill()
            else:
                b.unplug() if end == "link" else b.mute()
            said = rsh.communicate(timeout=10)[1]
            assert rsh.returncode == (-signal.SIGKILL if end == "client" else LOST), said
            assert end == "client" or "is silent for 1 s" in said
            # SIGTERM is ignored: 1 s of silence, 0.7 s of grace, and what a busy machine adds
            if end != "one way":  # a host that hears its client does not fence itself, until the client has gone
                wait_until(lambda: not commands(b), 4 - (time.monotonic() - begun), "the end of what ran there")
            b.plug() if end == "link" else None
            b.mute(False) if end == "one way" else None
            wait_until(lambda: not commands(b), 4, "the end of what ran there")
            wait_until(lambda: a.reaches(b), 10, "the mended link")


def test_mpirun_starts_its_ranks_through_agents(tmp_path: Path) -> None:
    shell = tmp_path / "allspan-rsh"
    shell.write_text(f'#!/bin/sh\nexec {" ".join(ALLSPAN)} rsh "$@"\n')
    shell.chmod(0o755)
    program = tmp_path / "sum.py"
    program.write_text(
        "import socket\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        "found = world.gather((socket.gethostname(), world.rank, world.allreduce(world.rank + 1)))\n"
        "print(*found or (), sep='\\n', end='', flush=True)\n"  # one rank writes: mpirun mixes the output of two
    )
    with hosts_with_an_agent(tmp_path) as (hosts, env):
        a, b = hosts
        network = hosts.network
        mpirun = identify(find_mpirun())
        daemon, agent = ("--prtemca", "plm_ssh_agent") if mpirun.version >= (5,) else ("--mca", "plm_rsh_agent")
        words = [mpirun.path, daemon, agent, str(shell), "--bind-to", "none"]
        words += [daemon, "oob_tcp_if_include", network, "--mca", "btl_tcp_if_include", network]
        words += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        if mpirun.version < (5,):  # its daemons leave the remote shell, else, and the agent ends them
            words += ["--mca", "orte_leave_session_attached", "1"]
        words += ["-n", "1", "--host", a.name, sys.executable, str(program), ":"]
        words += ["-n", "1", "--host", b.name, sys.executable, str(program)]
        ran = a.run(words, timeout=60, env=env)
        assert ran.stdout.splitlines() == [str((a.name, 0, 3)), str((b.name, 1, 3))]
        wait_until(lambda: len(b.processes()) == 1, 10, "the end of all but the agent")
