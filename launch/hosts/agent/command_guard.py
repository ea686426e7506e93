"""`python -IS command_guard.py FD GRACE_S COMMAND`: runs a command for /bin/sh and ends it with all that it started.

The socket FD is the agent's other end. When it closes, because the client is gone or the agent itself, the command's
process group gets SIGTERM and, GRACE_S seconds later, every descendant SIGKILL. At the end a line with the exit code
and the signal is written to it. A program of its own: as the "subreaper" it becomes the parent of daemons, too.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(control: socket.socket, grace_s: float, command: str) -> None:
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the agent decides when this ends
    pid = start(command, control)
    silence()
    deadline = float("inf")
    while (status := reap(pid)) is None:
        wait_s = min(60.0, max(0.0, deadline - time.monotonic()))
        watched = [woken] if deadline < float("inf") else [woken, control.fileno()]
        readable, _, _ = select.select(watched, [], [], wait_s)
        if woken in readable:
            os.read(woken, 512)
        if control.fileno() in readable and not control.recv(1):
            deadline = time.monotonic() + grace_s
            send(-pid, signal.SIGTERM)
        if time.monotonic() >= deadline:
            kill_all()
    if deadline < float("inf"):  # what the command started has the rest of the time, too
        while time.monotonic() < deadline and descendants():
            time.sleep(0.02)
            reap(0)
    kill_all()
    code = os.waitstatus_to_exitcode(status)
    line = f"{max(code, 0)} {max(-code, 0)}\n"
    try:
        control.sendall(line.encode())
    except OSError:
        os._exit(0)  # nobody asks any more
    os._exit(0)


def start(command: str, control: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        control.close()
        os.execv("/bin/sh", ["/bin/sh", "-c", command])
    except OSError as error:
        os.write(2, f"/bin/sh: {error.strerror}\n".encode())
    os._exit(127)


def silence() -> None:
    """Lets go of the command's pipes, so that their other ends see when the command closes its own."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)


def reap(pid: int) -> int | None:
    """Takes every ended child, and returns the status of `pid` when it is among them."""
    status = None
    while True:
        try:
            ended, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not ended:
            return status
        if ended == pid:
            status = code


def descendants() -> list[int]:
    """Returns the processes below this one that have not ended, from /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if words[0] not in (b"Z", b"X"):
                parents[int(name)] = int(words[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def kill_all() -> None:
    """Ends every descendant: again and again, since one may start another while this looks."""
    for _ in range(100):
        if not (alive := descendants()):
            return
        for pid in alive:
            send(pid, signal.SIGKILL)
        time.sleep(0.01)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it ended meanwhile, or took another user's rights


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), sys.argv[3])
