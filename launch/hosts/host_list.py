"""The hosts of a cluster and their numbers of ranks: from a flag, a hostfile, Slurm's allocation or LeaderWorkerSet."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from allspan.protos.api.errors import ConfigError

SCONTROL_TIMEOUT_S = 20.0
MAX_HOSTS = 1024
MAX_SLOTS = 1024
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class HostsConfig:
    """The settings for ranks on several hosts."""

    hosts: tuple[str, ...] | None = None
    """Names the hosts of the ranks, this one first, each with its number of ranks, as in a:2,b:2 (without a number: one
    rank); "slurm" takes those of the job's allocation, "lws" those of a LeaderWorkerSet's group; empty: this host."""
    hostfile: str = ""
    """Names a file of hosts, a line each, as in "a slots=2", this host first; # begins a comment."""
    remote_shell: str = ""
    """Sets what starts programs on the other hosts: ssh, agent (`allspan agent` runs there), srun, or the path of a
    program that takes HOST COMMAND as ssh does. Empty takes srun with --hosts slurm, agent with --hosts lws, else
    ssh."""
    mpi_network: str = ""
    """Sets the private network between the hosts, as in 10.1.0.0/16, in which each has one address. MPI neither
    encrypts nor authenticates there. Required with several hosts."""
    host_timeout: float = 3.0
    """Sets the seconds without a sign of life after which a host is taken for lost; a host that hears nothing of the
    supervisor for as long ends its ranks."""
    min_hosts: int = 1
    """Sets the hosts that the ranks may start again on, with fewer ranks, when others of --hosts stay away after a
    failure; the number of hosts waits for all of them. The first start needs all."""

    @property
    def is_given(self) -> bool:
        return bool(self.hosts is not None or self.hostfile)

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """Returns --mpi-network. Raises ConfigError when it is none."""
        try:
            return ipaddress.ip_network(self.mpi_network, strict=False)
        except ValueError as error:
            raise ConfigError(
                f"--mpi-network is {self.mpi_network!r}, must be a network such as 10.1.0.0/16"
            ) from error


@dataclass(frozen=True)
class Host:
    """One host, by the name that the remote shell takes, and the number of its ranks."""

    name: str
    slots: int = 1


def read_hosts(config: HostsConfig, environ: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Returns the hosts in the order of their ranks; none when no flag names any. Raises ConfigError with the flag."""
    if not config.is_given:
        for flag, value in (("--mpi-network", config.mpi_network), ("--remote-shell", config.remote_shell)):
            if value:
                raise ConfigError(f"{flag} is given without --hosts or --hostfile: the ranks are on this host alone")
        return ()
    if config.hosts and config.hostfile:
        raise ConfigError("--hosts and --hostfile are both given; one of them names the hosts")
    if config.hostfile:
        return _checked(_from_file(config.hostfile), "--hostfile")
    if not config.hosts:
        raise ConfigError("--hosts is empty; name the hosts, this one first, as in --hosts a:2,b:2, or leave it out")
    if len(config.hosts) == 1 and (source := SOURCES.get(config.hosts[0])):
        return _checked(source(environ), f"--hosts {config.hosts[0]}")
    return _checked(tuple(_host(word) for word in config.hosts), "--hosts")


def check_network(config: HostsConfig, hosts: tuple[Host, ...]) -> None:
    """Raises ConfigError when several hosts have no network between them."""
    if config.mpi_network:
        _ = config.network
    elif len(hosts) > 1:
        raise ConfigError(
            f"--mpi-network is missing: the ranks of {len(hosts)} hosts talk in clear over a private network; name it, "
            "as in --mpi-network 10.1.0.0/16 (`ip -brief address` shows each host's)"
        )
    if not 1 <= config.min_hosts <= len(hosts):
        raise ConfigError(f"--min-hosts is {config.min_hosts}, must be from 1 to the number of hosts, {len(hosts)}")
    if not 1 <= config.host_timeout <= 3600:
        raise ConfigError(f"--host-timeout is {config.host_timeout:g}, must be between 1 and 3600 seconds")


def _host(word: str) -> Host:
    """Parses "a", "a:2" or "[fe80::1]:2"."""
    name, colon, count = word.strip().rpartition(":")
    if not colon:
        name, count = word.strip(), "1"
    if not (slots := _number(count, MAX_SLOTS)):
        raise ConfigError(f"--hosts names {word!r}: {count!r} is no number of ranks from 1 to {MAX_SLOTS}, as in a:2")
    return Host(name.strip("[]"), slots)


def _number(text: str, most: int) -> int:
    """Returns the number from 1 to `most` that a text is; 0 for any other."""
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if is_number and int(text) <= most else 0


def _from_file(path: str) -> tuple[Host, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = 1
        for word in words[1:]:
            key, equals, value = word.partition("=")
            count = _number(value, MAX_SLOTS)
            if key not in ("slots", "max_slots", "max-slots") or not equals or not count:
                raise ConfigError(
                    f"--hostfile {path}, line {number}: {word!r} is not understood; write NAME slots=N, N from 1 to "
                    f"{MAX_SLOTS}"
                )
            slots = count if key == "slots" else slots
        hosts.append(Host(words[0], slots))
    return tuple(hosts)


def _from_slurm(environ: Mapping[str, str]) -> tuple[Host, ...]:
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise ConfigError("--hosts slurm: SLURM_JOB_NODELIST is not set; start this inside sbatch or salloc")
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        raise ConfigError("--hosts slurm: scontrol is not in $PATH; it tells the names of the job's nodes")
    try:
        run = subprocess.run(
            [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--hosts slurm: scontrol show hostnames fails: {error}") from error
    if run.returncode:
        raise ConfigError(f"--hosts slurm: scontrol show hostnames fails: {run.stderr.strip()}")
    names = run.stdout.split()
    here = environ.get("SLURMD_NODENAME") or socket.gethostname()
    if names and here.partition(".")[0] != names[0].partition(".")[0]:
        raise ConfigError(
            f"--hosts slurm: this host is {here}, the job's first node {names[0]}: start this there, by sbatch, or by "
            "`salloc … bash deploy/slurm/model.sbatch`, which goes there by srun"
        )
    tasks = expand_tasks(environ.get("SLURM_TASKS_PER_NODE", ""), len(names))
    return tuple(Host(name, count) for name, count in zip(names, tasks, strict=True))


def expand_tasks(text: str, num_nodes: int) -> tuple[int, ...]:
    """Expands Slurm's short form of the tasks of each node: "2(x2),1" is 2, 2, 1; empty is one each."""
    if not text:
        return (1,) * num_nodes
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:\(x(\d{1,4})\))?", part.strip())
        if match is None:
            raise ConfigError(f"--hosts slurm: SLURM_TASKS_PER_NODE is {text!r}, must be as in 2(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != num_nodes:
        raise ConfigError(
            f"--hosts slurm: SLURM_TASKS_PER_NODE {text!r} is for {len(counts)} nodes, the job has {num_nodes}"
        )
    return tuple(counts)


def _from_lws(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """A group's pods are NAME-0 (the leader), NAME-0-1, NAME-0-2 … in the leader's domain."""
    leader, size = environ.get("LWS_LEADER_ADDRESS", ""), environ.get("LWS_GROUP_SIZE", "")
    if not leader or not (count := _number(size, MAX_HOSTS)):
        raise ConfigError(
            f"--hosts lws: LWS_LEADER_ADDRESS is {leader!r} and LWS_GROUP_SIZE {size!r}, must be from 1 to "
            f"{MAX_HOSTS}; LeaderWorkerSet sets both in each pod of a group"
        )
    index = environ.get("LWS_WORKER_INDEX", "0")
    if index != "0":
        raise ConfigError(
            f"--hosts lws: LWS_WORKER_INDEX is {index}; `allspan serve` runs in the leader's pod (index 0), "
            "`allspan agent` in the others"
        )
    pod, dot, domain = leader.partition(".")
    return tuple(Host(f"{pod}-{k}{dot}{domain}" if k else leader) for k in range(count))


SOURCES: dict[str, Callable[[Mapping[str, str]], tuple[Host, ...]]] = {"slurm": _from_slurm, "lws": _from_lws}


def _checked(hosts: tuple[Host, ...], flag: str) -> tuple[Host, ...]:
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise ConfigError(f"{flag} names {len(hosts)} hosts, must be 1 to {MAX_HOSTS}")
    for host in hosts:
        # A name is a word of commands and a part of log lines: nothing that a shell or a program's flags could mean.
        if not _NAME.fullmatch(host.name) and not _is_address(host.name):
            raise ConfigError(f"{flag} names {host.name!r}, which is no host name or address")
        if host.slots < 1:
            raise ConfigError(f"{flag} gives host {host.name} {host.slots} ranks, must be at least 1")
    names = [host.name for host in hosts]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"{flag} names {twice[0]} twice; give its number of ranks once, as in {twice[0]}:2")
    return hosts


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
