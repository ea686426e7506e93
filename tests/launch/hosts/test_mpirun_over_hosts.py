"""mpirun's command over hosts, the remote shells, and the placement of ranks."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from allspan.launch.hosts.host_list import Host, HostsConfig
from allspan.launch.hosts.messages import Address, Facts
from allspan.launch.hosts.mpirun import Job, RankCommand, check_mpirun, command
from allspan.launch.hosts.placement import address_in_network, place_over_hosts
from allspan.launch.hosts.remote_shell import RemoteShell, find_remote_shell
from allspan.launch.placement.placement import PlacementConfig, RankPlace
from allspan.launch.placement.topology import Node, Topology
from allspan.launch.supervision.mpi import MPICH, OPEN_MPI, Mpirun
from allspan.protos.api.errors import ConfigError

RUN, SHM = Path("/run/x"), Path("/dev/shm/x")
JOB = Job(RUN / "remote-shell", "10.1.0.0/16", RUN, SHM, {"a": 1, "b": 2})


def rank(number: int, host: str) -> RankCommand:
    return RankCommand(RankPlace(number, None, 3, host=host), RUN / f"w{number}", RUN / f"exit-{number}.e1", "eth0")


@pytest.mark.parametrize(
    ("version", "agent"), [((5, 0, 11), "--prtemca plm_ssh_agent"), ((4, 1, 4), "--mca plm_rsh_agent /bin/sh")]
)
def test_each_rank_is_an_app_context_on_its_host(version: tuple[int, ...], agent: str) -> None:
    ranks = [rank(0, "a"), rank(1, "b"), rank(2, "b")]
    environ = {"ALLSPAN_X": "1", "MPI4PY_LIBMPI": "/m.so", "LD_LIBRARY_PATH": "/c", "SECRET": "2"}
    words = command(Mpirun("/opt/mpi/bin/mpirun", OPEN_MPI, version), JOB, ranks, environ)
    text = " ".join(words)
    assert f"{agent} /run/x/remote-shell" in text
    assert "oob_tcp_if_include 10.1.0.0/16" in text
    assert "btl_tcp_if_include 10.1.0.0/16" in text
    assert "oob_tcp_keepalive_probes 3" in text
    contexts = text.split(" : ")
    assert ["--host a:1" in contexts[0], "--host b:2" in contexts[1], "--host b:2" in contexts[2]] == [True] * 3
    assert "ALLSPAN_X=1 MPI4PY_LIBMPI=/m.so TMPDIR=/dev/shm/x OMP_NUM_THREADS=3" in contexts[2]
    assert "LD_LIBRARY_PATH=/c:/opt/mpi/lib" in contexts[2]
    assert "NCCL_SOCKET_IFNAME==eth0" in contexts[2]
    assert contexts[2].endswith("rank_shell.py /run/x/exit-2.e1 " + " ".join(words[-4:]))
    assert "SECRET" not in text


def test_mpich_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs Open MPI"):
        check_mpirun(Mpirun("/mpirun", MPICH, (4, 2)))


def facts(name: str, cores: int, *addresses: str) -> Facts:
    topology = asdict(Topology((Node(0, tuple((core,) for core in range(cores)), 1 << 30),)))
    entries = tuple(Address(f"eth{i}", address, 24) for i, address in enumerate(addresses))
    return Facts(name, "1", "3", 0.0, 1, 1 << 30, topology, (), entries)


def test_ranks_are_placed_by_each_hosts_cores() -> None:
    both = {"a": facts("a", 4), "b": facts("b", 8)}
    placed = place_over_hosts([Host("a", 1), Host("b", 2)], both, PlacementConfig(), "cpu")
    assert [(place.rank, place.host, place.threads) for place in placed.ranks] == [
        (0, "a", 4),
        (1, "b", 4),
        (2, "b", 4),
    ]
    assert "on hosts a, b" in placed.describe()


def test_a_host_with_too_few_cores_is_named() -> None:
    with pytest.raises(ConfigError, match="host b: --ranks x --threads is 3 x 1"):
        place_over_hosts([Host("b", 3)], {"b": facts("b", 2)}, PlacementConfig(threads=1), "cpu")
    with pytest.raises(ConfigError, match="--ranks is 2, --hosts gives 3"):
        place_over_hosts([Host("b", 3)], {"b": facts("b", 8)}, PlacementConfig(ranks=2), "cpu")


def stages_of(listed: dict[str, int], stages: int, ranks: int = 0) -> list[list[str]]:
    """The hosts of each stage's ranks."""
    hosts, told = [Host(name, slots) for name, slots in listed.items()], {name: facts(name, 8) for name in listed}
    placed = place_over_hosts(hosts, told, PlacementConfig(ranks=ranks, stages=stages), "cpu").ranks
    width = len(placed) // stages
    return [[place.host for place in placed[first : first + width]] for first in range(0, len(placed), width)]


def test_stages_are_on_hosts_in_their_order() -> None:
    assert stages_of({"a": 1, "b": 1}, 2) == [["a"], ["b"]]
    assert stages_of({"a": 2, "b": 2}, 2) == stages_of({"a": 2, "b": 2}, 2, ranks=2) == [["a", "a"], ["b", "b"]]
    assert stages_of({"a": 2, "b": 2}, 4) == [["a"], ["a"], ["b"], ["b"]]
    assert stages_of({"a": 1, "b": 1, "c": 2}, 2) == [["a", "b"], ["c", "c"]]


@pytest.mark.parametrize(
    ("listed", "stages", "ranks", "words"),
    [
        ({"a": 1, "b": 3}, 2, 0, r"stage 0 has some of host b's ranks and ranks of another host"),
        ({"a": 2, "b": 1}, 2, 0, r"--pipeline-parallel-size is 2, .* the 3 ranks of --hosts \(a:2, b:1"),
        ({"a": 2, "b": 2}, 2, 4, "--pipeline-parallel-size x --ranks is 2 x 4, --hosts gives 4"),
    ],
)
def test_stages_that_hosts_cannot_hold_are_refused(listed: dict[str, int], stages: int, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stages_of(listed, stages, ranks)


def test_a_host_has_one_address_in_the_network() -> None:
    config = HostsConfig(mpi_network="10.1.0.0/16")
    assert address_in_network("a", facts("a", 1, "192.168.0.1", "10.1.0.7"), config).interface == "eth1"
    with pytest.raises(ConfigError, match=r"host a has no address in --mpi-network 10.1.0.0/16.*192.168.0.1 \(eth0\)"):
        address_in_network("a", facts("a", 1, "192.168.0.1"), config)
    with pytest.raises(ConfigError, match="host a has 2 addresses"):
        address_in_network("a", facts("a", 1, "10.1.0.7", "10.1.0.8"), config)


def test_the_launch_agent_drops_options_before_the_host(tmp_path: Path) -> None:
    agent = RemoteShell("echo", ("echo", "two words")).write_launch_agent(tmp_path)
    said = subprocess.run([agent, "-x", "-q", "b", "run -x"], capture_output=True, text=True, check=True).stdout
    assert said == "two words b run -x\n"


def test_agents_certificates_are_found_from_mpiruns_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLSPAN_AGENT_SSL_KEYFILE", "certs/agent.key")
    shell = find_remote_shell(HostsConfig(("a", "b"), remote_shell="agent"))
    assert f"ALLSPAN_AGENT_SSL_KEYFILE={tmp_path}/certs/agent.key" in shell.words


def test_a_remote_shell_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="--remote-shell is no-such-shell"):
        find_remote_shell(HostsConfig(("a", "b"), remote_shell="no-such-shell"))
