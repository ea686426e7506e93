"""Debian's sshd on a host of network_hosts, and an `ssh` that finds it and has the key to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.network_hosts import Host
from support.waiting import wait_until

PORT = 22022
_SERVER = """ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
ClientAliveInterval 1
ClientAliveCountMax 3
"""
_CLIENT = """Host *
Port {port}
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
"""


@contextmanager
def sshd(host: Host, folder: Path) -> Iterator[Path]:
    """Starts sshd there and returns a folder with a program `ssh`, to be first in $PATH. Skips without sshd."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    ssh = shutil.which("ssh")
    if program is None or ssh is None:
        pytest.skip("not installed: sshd and ssh (Debian: openssh-server openssh-client)")
    for name in ("host_key", "key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    words = {"address": host.address, "port": str(PORT), "folder": str(folder)}
    (folder / "sshd_config").write_text(_SERVER.format(**words))
    (folder / "ssh_config").write_text(_CLIENT.format(**words))
    key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[{host.name}]:{PORT} {key}[{host.address}]:{PORT} {key}")
    client = folder / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {ssh} -F {folder}/ssh_config "$@"\n')
    client.chmod(0o755)
    # The folder of its unprivileged part, which Debian's unit makes; seen by this host alone.
    host.run(["sh", "-c", "mount -t tmpfs -o mode=0755 tmpfs /run && mkdir -m 0755 /run/sshd"])
    log = folder / "sshd.log"
    with log.open("wb") as out, host.popen([program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=out) as run:
        try:
            wait_until(lambda: "listening" in log.read_text() or run.poll() is not None, 10, "sshd")
            assert run.poll() is None, log.read_text()
            yield client.parent
        finally:
            run.kill()
