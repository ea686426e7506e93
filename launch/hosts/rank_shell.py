"""`python -S -E rank_shell.py EXIT_FILE COMMAND…`: runs a rank as its child and writes how it ended to a file.

mpirun starts a rank through it, since only a process's parent learns its exit status. Signals are passed on; the rank
is in a process group of its own, so that what mpirun sends is told from what killed the rank. The kernel kills the rank
when this process ends, and this process ends the rank when the host's keeper has ended. Beside EXIT_FILE, exit-K.eE:

start-K.eE   {"pid", "shell"}, as soon as the rank runs
log-K.eE     the end of its output, 1 MiB at most; what came before is in log-K.eE.1

Imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
ALIVE, LOCK = "alive", "lock"
"""The pipe that the keeper holds open for writing, and the file whose lock it holds."""
KEPT_BYTES = 1 << 20
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SLOW_READER_MS = 20


def sibling(exit_file: str, kind: str) -> str:
    """Returns the path of a rank's "start" or "log" file."""
    folder, name = os.path.split(exit_file)
    return os.path.join(folder, kind + name.removeprefix("exit"))


class Output:
    """Keeps what a rank writes in its log file, and passes it on to this process's standard output."""

    def __init__(self, pipe: int, path: str) -> None:
        self.pipe = pipe
        self._path = path
        self._size = 0
        os.set_blocking(pipe, False)
        with contextlib.suppress(OSError):
            os.set_blocking(1, False)

    def pass_on(self) -> bool:
        """Returns whether there may be more."""
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return False
        # Neither a full disk nor a reader beyond a broken link may stop the rank: the text is lost there.
        with contextlib.suppress(OSError):
            if self._size + len(data) > KEPT_BYTES:
                os.replace(self._path, f"{self._path}.1")
                self._size = 0
            with open(self._path, "ab") as file:
                file.write(data)
            self._size += len(data)
        with contextlib.suppress(OSError):
            rest = data
            while rest and select.select([], [1], [], SLOW_READER_MS / 1000)[1]:
                rest = rest[os.write(1, rest) :]
        return bool(data)


def watch_keeper(folder: str) -> int | None:
    """Returns a pipe that hangs up when the keeper ends; None where there is no keeper. Ends this process when the
    keeper has ended already."""
    try:
        pipe = os.open(os.path.join(folder, ALIVE), os.O_RDONLY | os.O_NONBLOCK)
        lock = os.open(os.path.join(folder, LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return pipe
    sys.exit("rank_shell: the keeper of this host has ended")


def write_atomically(path: str, values: dict[str, object]) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(f"{path}.new", path)


def start(command: Sequence[str], output: int) -> int:
    """Returns the rank's process number."""
    own = os.getpid()
    if pid := os.fork():
        with contextlib.suppress(OSError):  # it did so itself: a signal may be passed on before or after
            os.setpgid(pid, pid)
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)  # the parent ended before the line above
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"rank_shell: cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def end_likewise(status: int) -> None:
    """Ends this process as the rank ended, so that mpirun sees the same."""
    if status >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(128 - status)


def main(exit_file: str, command: Sequence[str]) -> None:
    alive = watch_keeper(os.path.dirname(exit_file))
    read, write = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pid = start(command, write)
    os.close(write)
    rank = os.pidfd_open(pid)
    ended_by = 0

    def pass_on(number: int, frame: object) -> None:
        nonlocal ended_by
        ended_by = number if number in ENDING else ended_by
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    write_atomically(sibling(exit_file, "start"), {"pid": pid, "shell": os.getpid()})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    output, poller = Output(read, sibling(exit_file, "log")), select.poll()
    for fd in (read, rank, *([] if alive is None else [alive])):
        poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if alive in ready:
            signal.pidfd_send_signal(rank, signal.SIGKILL)
            os._exit(1)
        if rank in ready:
            break
        if read in ready and not output.pass_on():
            poller.unregister(read)
    ended, at = time.monotonic(), time.time()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    while output.pass_on():
        pass
    death = {"signal": max(-status, 0), "code": max(status, 0), "ended_by": ended_by, "ended": ended, "at": at}
    with contextlib.suppress(OSError):  # the folder is gone, and the keeper with it
        write_atomically(exit_file, {"pid": pid, **death})
    end_likewise(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
