"""Ends what a world has on one host: its ranks, the MPI daemon that started them, and its two folders.

Runs beside each keeper as a process of its own, `python -S -m allspan.launch.hosts.fence RUN_DIR SHM_DIR KEEPER LIMIT
KEEP`, and acts when the keeper ends without goodbye, or has written nothing to this standard input for LIMIT seconds
(it is stopped): then it kills the keeper, too. KEEP "1" leaves the folders to a supervisor on the same host.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress

from allspan.launch.hosts.lines import Silence
from allspan.launch.hosts.messages import BEAT_S
from allspan.launch.supervision import reaper

DAEMONS = {b"prted", b"orted", b"prterun", b"mpirun", b"orterun", b"mpiexec"}


def processes(run_dir: str, shm_dir: str) -> list[int]:
    """Returns the live processes of a world on this host: ranks and their starters by the files that they are given,
    MPI daemons by the folder of their files, and everything that inherited that folder's name."""
    run, shm = os.fsencode(run_dir), os.fsencode(shm_dir)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if _is_of(name, run, shm):
                found.append(int(name))
        except OSError:
            continue  # it is gone, or another user's
    return found


def kill(run_dir: str, shm_dir: str, timeout_s: float = 8.0) -> list[int]:
    """Kills a world's processes on this host and waits for their end; returns those that live on."""
    deadline = time.monotonic() + timeout_s
    while left := processes(run_dir, shm_dir):
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return left


def clean(run_dir: str, shm_dir: str, keeps_folders: bool = False) -> None:
    """Ends a world's processes on this host and removes its folders."""
    kill(run_dir, shm_dir)
    if not keeps_folders:
        for folder in (shm_dir, run_dir):
            shutil.rmtree(folder, ignore_errors=True)


def main(run_dir: str, shm_dir: str, keeper: int, limit_s: float, keeps_folders: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        pidfd = os.pidfd_open(keeper)
    except ProcessLookupError:
        clean(run_dir, shm_dir, keeps_folders)
        return
    silence, last = Silence(), b""
    while silence.look() < limit_s:
        if select.select([0], [], [], BEAT_S / 2)[0]:
            data = os.read(0, 1 << 12)
            if not data:
                break
            last = (last + data)[-len(reaper.GOODBYE) :]
            silence.heard()
    if last != reaper.GOODBYE:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        clean(run_dir, shm_dir, keeps_folders)


def _is_of(pid: str, run: bytes, shm: bytes) -> bool:
    words = _words(pid, "cmdline")
    if any(word.startswith((run + b"/worker-", run + b"/exit-")) for word in words):
        return True
    if os.path.basename(words[0]) in DAEMONS and any(shm in word or run in word for word in words):
        return True
    return any((word.partition(b"=")[2] + b"/").startswith(shm + b"/") for word in _words(pid, "environ"))


def _words(pid: str, file: str) -> list[bytes]:
    with open(f"/proc/{pid}/{file}", "rb") as words:
        return words.read().split(b"\0")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "1")
