"""A process's surroundings made bad: other mounts, a control group's memory limit, hosts of a network of their own.

All of it needs root and changes nothing for others; a test that cannot have it is skipped with "root: needs …".
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


def with_mounts(script: str) -> list[str]:
    """Words before a command that first run `script` (of /bin/sh) in a mount namespace of the command's own."""
    trial = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    if shutil.which("unshare") is None or subprocess.run(trial, capture_output=True).returncode != 0:
        pytest.skip("root: needs the right to mount (and unshare of util-linux)")
    return ["unshare", "--mount", "sh", "-e", "-c", f'{script}\nexec "$@"', "sh"]


@dataclass(frozen=True)
class MemoryGroup:
    """A memory control group, version 1 or 2."""

    path: Path

    @property
    def limit(self) -> Path:
        return self.path / ("memory.max" if (self.path / "memory.max").exists() else "memory.limit_in_bytes")

    @property
    def usage_bytes(self) -> int:
        name = "memory.current" if (self.path / "memory.current").exists() else "memory.usage_in_bytes"
        return int((self.path / name).read_text())

    def set_limit(self, num_bytes: int) -> None:
        if (swap := self.path / "memory.swap.max").exists():
            swap.write_text("0")
        self.limit.write_text(str(num_bytes))

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    @property
    def wrap(self) -> list[str]:
        """Words before a command that runs in this group from its start."""
        return ["sh", "-e", "-c", f'echo $$ > {self.path}/cgroup.procs\nexec "$@"', "sh"]


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new one, without a limit at first."""
    name = f"allspan-test-{secrets.token_hex(3)}"
    base = CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS
    group = MemoryGroup(base / name)
    try:
        group.path.mkdir()
    except OSError as error:
        pytest.skip(f"root: needs a memory control group that can be written to: {error}")
    try:
        if not group.limit.exists():
            pytest.skip(f"root: needs the memory controller in {base}")
        yield group
    finally:
        group.path.rmdir()


@dataclass(frozen=True)
class Network:
    """Two hosts, network namespaces joined by one cable; `addresses[i]` is host i's."""

    names: tuple[str, str]
    addresses: tuple[str, str] = field(default=("10.213.7.1", "10.213.7.2"))

    def on(self, host: int) -> list[str]:
        """Words before a command that runs on that host."""
        return ["ip", "netns", "exec", self.names[host]]

    def unplug(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", "v1", "down")

    def plug(self) -> None:
        _ip("-n", self.names[1], "link", "set", "v1", "up")


@contextmanager
def network() -> Iterator[Network]:
    name = f"allspan-test-{secrets.token_hex(3)}"
    names = (f"{name}-a", f"{name}-b")
    net = Network(names)
    made = []
    try:
        for name in names:
            if shutil.which("ip") is None or not _ip("netns", "add", name, check=False):
                pytest.skip("root: needs network namespaces (and ip of iproute2)")
            made.append(name)
        ends = ["v0", "netns", names[0], "type", "veth", "peer", "v1", "netns", names[1]]
        if not _ip("link", "add", *ends, check=False):
            pytest.skip("root: needs a kernel with veth")
        for i, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{net.addresses[i]}/24", "dev", f"v{i}")
            for link in ("lo", f"v{i}"):
                _ip("-n", name, "link", "set", link, "up")
        yield net
    finally:
        for name in made:
            _ip("netns", "del", name)


def _ip(*words: str, check: bool = True) -> bool:
    run = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert run.returncode == 0 or not check, f"ip {' '.join(words)}: {run.stderr}"
    return run.returncode == 0
