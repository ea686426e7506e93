"""Cleans up after a supervisor that was killed: no process, socket or shared-memory file of its cluster stays.

Runs as a process of its own, `python -S reaper.py RUN_DIR SHM_DIR`, and waits for the end of its standard input, which
is a pipe from the supervisor. A supervisor that ends in order says goodbye first. Imports nothing of ours.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import time

OWNER_FILE = "owner"
GOODBYE = b"bye"


def owner_of(shm_dir: str | os.PathLike[str]) -> str:
    """The run directory that a shared-memory folder belongs to, "" when it does not say."""
    try:
        with open(os.path.join(shm_dir, OWNER_FILE), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def processes(run_dir: str) -> list[int]:
    """The live processes of a cluster, mpirun and ranks: those whose command lines name its config files, or those of
    its replicas."""
    is_config = re.compile(re.escape(os.fsencode(run_dir)) + rb"/(replica-\d+/)?worker-").match
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue  # gone meanwhile
        if any(map(is_config, words)):
            found.append(int(name))
    return found


def kill(run_dir: str, timeout_s: float = 8.0) -> list[int]:
    """Kills a cluster's processes and waits for their end; returns those that live on."""
    deadline = time.monotonic() + timeout_s
    while left := processes(run_dir):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def clean(run_dir: str, shm_dir: str = "") -> None:
    """Ends a cluster's processes and removes its folders."""
    kill(run_dir)
    for folder in (shm_dir, run_dir):
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def main(run_dir: str, shm_dir: str) -> None:
    # A terminal's Ctrl-C reaches the whole group; the supervisor handles it, and may be killed while it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = b""
    while data := os.read(0, 64):
        words += data
    if not words.startswith(GOODBYE):
        clean(run_dir, shm_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
