"""Where the hosts of a cluster come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.launch.hosts.host_list import Host, HostsConfig, check_network, expand_tasks, read_hosts
from allspan.protos.api.errors import ConfigError


def test_hosts_keep_their_order_and_numbers_of_ranks() -> None:
    assert read_hosts(HostsConfig(("b:2", "a", "10.0.0.3:4"))) == (Host("b", 2), Host("a", 1), Host("10.0.0.3", 4))
    assert read_hosts(HostsConfig()) == ()


def test_a_hostfile_has_a_host_a_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the rack\na slots=2 max_slots=4\n\nb  # one rank\n")
    assert read_hosts(HostsConfig(hostfile=str(file))) == (Host("a", 2), Host("b", 1))
    file.write_text("a slots=two\n")
    with pytest.raises(ConfigError, match="line 1: 'slots=two'"):
        read_hosts(HostsConfig(hostfile=str(file)))


def test_slurms_allocation_gives_nodes_and_tasks(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames n[1-2],m" ] && printf "n1\\nn2\\nm\\n"\n')
    scontrol.chmod(0o755)
    environ = {"SLURM_JOB_NODELIST": "n[1-2],m", "SLURM_TASKS_PER_NODE": "2(x2),1", "PATH": f"{tmp_path}:/bin"}
    with pytest.raises(ConfigError, match=r"this host is login\.x, the job's first node n1: start this there"):
        read_hosts(HostsConfig(("slurm",)), environ | {"SLURMD_NODENAME": "login.x"})
    environ["SLURMD_NODENAME"] = "n1"
    assert read_hosts(HostsConfig(("slurm",)), environ) == (Host("n1", 2), Host("n2", 2), Host("m", 1))
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set"):
        read_hosts(HostsConfig(("slurm",)), {})


@pytest.mark.parametrize(("text", "counts"), [("", (1, 1, 1)), ("4(x3)", (4, 4, 4)), ("1,2(x2)", (1, 2, 2))])
def test_slurms_short_form_of_tasks_is_expanded(text: str, counts: tuple[int, ...]) -> None:
    assert expand_tasks(text, 3) == counts


@pytest.mark.parametrize("text", ["2(x2)", "two", "2(x", "2(x2),1,1"])
def test_tasks_that_are_not_for_these_nodes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE"):
        expand_tasks(text, 3)


def test_a_leader_worker_set_gives_its_pods() -> None:
    environ = {"LWS_LEADER_ADDRESS": "m-0.m.default", "LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "0"}
    names = [host.name for host in read_hosts(HostsConfig(("lws",)), environ)]
    assert names == ["m-0.m.default", "m-0-1.m.default", "m-0-2.m.default"]
    with pytest.raises(ConfigError, match="LWS_WORKER_INDEX is 1"):
        read_hosts(HostsConfig(("lws",)), environ | {"LWS_WORKER_INDEX": "1"})


def test_numbers_beyond_the_limits_are_refused_before_anything_is_made_of_them(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    for slots in ("\u00b2", "0", "1025", "99999999999999"):
        file.write_text(f"a slots={slots}\n")
        with pytest.raises(ConfigError, match=r"line 1: .* from 1 to 1024"):
            read_hosts(HostsConfig(hostfile=str(file)))
    environ = {"LWS_LEADER_ADDRESS": "m-0.m.default", "LWS_GROUP_SIZE": "1000000000"}
    with pytest.raises(ConfigError, match=r"LWS_GROUP_SIZE '1000000000', must be from 1 to 1024"):
        read_hosts(HostsConfig(("lws",)), environ)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (HostsConfig(()), "--hosts is empty"),
        (HostsConfig(mpi_network="10.0.0.0/8"), "--mpi-network is given without --hosts"),
        (HostsConfig(remote_shell="agent"), "--remote-shell is given without --hosts"),
    ],
)
def test_flags_of_several_hosts_need_hosts(config: HostsConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_hosts(config)


@pytest.mark.parametrize("word", ["a:0", "a:x", "-oProxyCommand=x", "a b", "a;b", ":2", "a:1025"])
def test_what_is_no_host_is_refused_by_its_name(word: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        read_hosts(HostsConfig((word,)))


def test_a_host_twice_and_two_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match="names a twice"):
        read_hosts(HostsConfig(("a", "b", "a:2")))
    with pytest.raises(ConfigError, match="both given"):
        read_hosts(HostsConfig(("a",), "file"))


def test_several_hosts_need_a_network() -> None:
    hosts = (Host("a"), Host("b"))
    with pytest.raises(ConfigError, match="--mpi-network is missing"):
        check_network(HostsConfig(), hosts)
    with pytest.raises(ConfigError, match="must be a network"):
        check_network(HostsConfig(mpi_network="eth0"), hosts)
    check_network(HostsConfig(mpi_network="10.1.0.0/16", min_hosts=2), hosts)
    with pytest.raises(ConfigError, match="--min-hosts is 3, must be from 1 to the number of hosts, 2"):
        check_network(HostsConfig(mpi_network="10.1.0.0/16", min_hosts=3), hosts)
    check_network(HostsConfig(), hosts[:1])
