"""The system's limits for this process, raised or checked before a cluster starts."""

from __future__ import annotations

import os
import resource
import stat
import sys

from allspan.launch.console import say
from allspan.protos.api.errors import ConfigError

OPEN_FILES = 65536
FILE_BYTES = 2**25
"""Bytes that a file may have in any case: MPI's segments of shared memory are files of 16 MiB."""


def allow_many_connections(needed: int) -> None:
    """Raises the limit of open files: each connection is one, and many systems allow 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(OPEN_FILES, needed) if hard == resource.RLIM_INFINITY else min(hard, max(OPEN_FILES, needed))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_file_size() -> None:
    """Raises the limit of a file's size as far as may be. ConfigError when no rank could start under it."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return
    if hard < FILE_BYTES:
        raise ConfigError(
            f"this process may write files of {hard} bytes (ulimit -f), the ranks' shared memory needs {FILE_BYTES}: "
            "raise the limit (`ulimit -f unlimited`, in a systemd unit LimitFSIZE=infinity)"
        )
    if stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode):
        say(f"the log is a file that may have {hard} bytes (ulimit -f): what comes after them is lost")
