"""Remote shells: programs that take HOST COMMAND… as ssh does and start everything that runs on another host."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from allspan.launch.hosts.host_list import SCONTROL_TIMEOUT_S, HostsConfig
from allspan.launch.hosts.mpirun import python_path
from allspan.protos.api.errors import ConfigError

SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3"),
)
LAUNCH_AGENT = "remote-shell"
AGENT_FILES = ("ALLSPAN_AGENT_SSL_CA_CERTS", "ALLSPAN_AGENT_SSL_CERTFILE", "ALLSPAN_AGENT_SSL_KEYFILE")
"""Variables whose values are paths of files on this host."""


@dataclass(frozen=True)
class RemoteShell:
    """A remote shell: `words HOST COMMAND` runs a command, one string, in a shell on a host."""

    name: str
    words: tuple[str, ...]

    def on(self, host: str, command: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the words that run `command` on `host`."""
        return (*self.words, host, shlex.join(command))

    def write_launch_agent(self, folder: Path) -> Path:
        """Writes the program with which mpirun starts its daemons, which takes options before HOST and drops them:
        Open MPI adds ssh's own to some."""
        path = folder / LAUNCH_AGENT
        text = '#!/bin/sh\nwhile case "$1" in -*) true ;; *) false ;; esac; do shift; done\n'
        path.write_text(f'{text}exec {shlex.join(self.words)} "$@"\n', encoding="utf-8")
        path.chmod(0o700)
        return path


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"--remote-shell is {name}, which is not in $PATH; give ssh, agent, srun or a program's path")
    return os.path.abspath(path)


def _ssh() -> tuple[str, ...]:
    return (_program("ssh"), *SSH_OPTIONS)


def _agent() -> tuple[str, ...]:
    return (*_environment(), sys.executable, "-m", "allspan.launch.cli", "rsh")


def _srun() -> tuple[str, ...]:
    """srun takes no HOST COMMAND: a line of shell turns them into its own words."""
    step = f"--overlap --nodes=1 --ntasks=1 --ntasks-per-node=1{_unbound()} --quiet --unbuffered"
    srun = f"host=$1; shift; exec {shlex.quote(_program('srun'))} {step}"
    return ("/bin/sh", "-c", f'{srun} --nodelist="$host" --input=all --export=ALL /bin/sh -c "$*"', "srun")


def _unbound() -> str:
    """The flag by which a step of one task has all processors of its job on that node. A Slurm that binds no tasks
    complains of it to standard error, which would stand in the cause of every lost host."""
    try:
        run = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--remote-shell srun: `scontrol show config` fails: {error}") from error
    return " --cpu-bind=none" if re.search(r"^TaskPlugin\s*=.*(affinity|cgroup)", run.stdout, re.M) else ""


def _environment() -> tuple[str, ...]:
    """The words before a command of ours that make the paths in its variables absolute: mpirun, which starts it, too,
    runs in the run directory."""
    paths = {name: os.path.abspath(path) for name, path in os.environ.items() if name in AGENT_FILES and path}
    if path := python_path():
        paths["PYTHONPATH"] = path
    return ("/usr/bin/env", *(f"{name}={path}" for name, path in paths.items())) if paths else ()


SHELLS: dict[str, Callable[[], tuple[str, ...]]] = {"ssh": _ssh, "agent": _agent, "srun": _srun}
_DEFAULTS: dict[tuple[str, ...], str] = {("slurm",): "srun", ("lws",): "agent"}


def find_remote_shell(config: HostsConfig) -> RemoteShell:
    """Returns the remote shell that --remote-shell names. Raises ConfigError when it is not installed."""
    name = config.remote_shell or _DEFAULTS.get(config.hosts or (), "ssh")
    if name in SHELLS:
        return RemoteShell(name, SHELLS[name]())
    return RemoteShell(name, (_program(name),))
