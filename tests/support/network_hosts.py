"""Several hosts on this machine: each is a set of network, UTS, IPC, PID and mount namespaces, joined by a bridge.

    with network_hosts(2) as (a, b):
        a.run([…, b.name])
        with a.popen([sys.executable, "-m", "allspan.launch.cli", "serve", …]) as serve: …

A host has its own name and address, its own /dev/shm, its own folder of run directories (/tmp/allspan-UID) and an
/etc/hosts with all names; everything else of the file system is shared. The PID namespace of the first host contains
the others', so that a remote shell of the first may enter them. Everything ends with one process, the init of the
outermost PID namespace, which the kernel kills when the test's thread ends: nothing is left even after kill -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shlex
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.waiting import wait_until

NAMESPACES = ("uts", "net", "ipc", "mount")
"""What a process of a host enters itself; the PID namespace must be set before it starts."""
_libc = ctypes.CDLL(None, use_errno=True)

_INIT = "trap '' CHLD\necho ready\nexec sleep infinity"
"""A namespace's first process: with SIGCHLD ignored, the kernel reaps what is left to it."""


@dataclass(frozen=True)
class Process:
    """A process of a host; `pid` is the number that it has for the test, not for the host."""

    pid: int
    command: str


@dataclass(frozen=True)
class Host:
    """`init` is its first process (the child of `holder`), `port` its end of the cable in the switch."""

    name: str
    address: str
    holder: int
    init: int
    inner_init: int
    port: str
    switch: int
    inode: str
    """Names its network namespace, for as long as it has processes."""

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this host; takes what subprocess.Popen takes, and is the command itself: its pid and
        exit status are the command's."""
        return _popen(self.init, words, options)

    def run(
        self, words: Sequence[str], timeout: float = 30.0, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on this host and returns its output as text, after `timeout` seconds at the latest."""
        with self.popen(words, stdout=-1, stderr=-1, text=True, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0 or not check, f"{words} on {self.name}: {process.returncode}: {out}{err}"
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)

    def processes(self) -> list[Process]:
        """What runs on this host, without its first process."""
        found = []
        for pid in _users(self.inode) - {self.init, self.holder}:
            with contextlib.suppress(OSError):  # it ended meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(pid, command.strip()))
        return found

    def reaches(self, other: Host, seconds: float = 0.5) -> bool:
        """Whether a packet gets to the other host and its answer back: the answer is that nobody listens."""
        run = self.run(["timeout", str(seconds), "bash", "-c", f"exec 3<>/dev/tcp/{other.address}/9"], check=False)
        return "refused" in run.stderr

    def signal_all(self, number: int) -> None:
        """SIGSTOP freezes the host, SIGCONT lets it go on."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def unplug(self) -> None:
        """Nothing gets through any more in both directions, and nobody is told."""
        self._link("down")

    def plug(self) -> None:
        self._link("up")

    def mute(self, muted: bool = True) -> None:
        """What this host sends is lost; what others send still comes."""
        _drop(self.init, "eth0", muted)

    def deafen(self, deaf: bool = True) -> None:
        """What others send to this host is lost; what it sends still gets through."""
        _drop(self.switch, self.port, deaf)

    def slow_down(self, rate: str = "100mbit") -> None:
        """Limits what this host sends."""
        _in_net(self.init, f"tc qdisc replace dev eth0 root tbf rate {rate} burst 32kb latency 10ms")

    def power_off(self) -> None:
        """Every process is gone at once, and the others hear no word of it (no FIN)."""
        self.unplug()
        os.kill(self.init, signal.SIGKILL)  # takes the whole PID namespace with it, where it has one of its own
        self.signal_all(signal.SIGKILL)
        wait_until(lambda: not self.processes(), what=f"the end of {self.name}'s processes")

    def _link(self, state: str) -> None:
        _in_net(self.switch, f"ip link set {self.port} {state}")


@dataclass(frozen=True)
class Hosts(Sequence[Host]):
    """`remote_shell` is a program for `HOST COMMAND…` as ssh is; it works from the test and from the first host."""

    hosts: tuple[Host, ...]
    network: str
    remote_shell: Path

    def __getitem__(self, index: Any) -> Any:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)


@contextmanager
def network_hosts(count: int) -> Iterator[Hosts]:
    """Hosts with random names; skips the test where namespaces are not allowed."""
    token = secrets.token_hex(2)
    folder = Path(tempfile.mkdtemp(prefix="network-hosts-"))
    folder.chmod(0o755)
    number = secrets.randbelow(250)
    names = [f"host{chr(ord('a') + i)}-{token}" for i in range(count)]
    addresses = [f"10.77.{number}.{i + 1}" for i in range(count)]
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in zip(names, addresses, strict=True))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    Path(f"/tmp/allspan-{os.getuid()}").mkdir(mode=0o700, exist_ok=True)
    holders = [_unshare(None, ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"], "")]
    switch = -1
    try:
        switch = _first_process(holders[0])
        _in_net(switch, "ip link set lo up", "ip link add bridge type bridge", "ip link set bridge up")
        for name in names:
            holders.append(_start(switch, name, folder / "hosts"))
        made = zip(holders[1:], names, addresses, strict=True)
        hosts = tuple(_connect(switch, holder, *host) for holder, *host in made)
        yield Hosts(hosts, f"10.77.{number}.0/24", _write_remote_shell(folder, switch, hosts))
    finally:
        inode = _namespace(switch, "net") if switch > 0 else ""
        if switch > 0:
            os.kill(switch, signal.SIGKILL)
        for holder in holders:
            holder.kill()
            holder.wait()
        wait_until(lambda: not inode or not _users(inode), what="the end of the hosts")
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def _start(switch: int, name: str, names: Path) -> subprocess.Popen[Any]:
    setup = [
        f"hostname {name}",
        "mount -t tmpfs -o size=512m,mode=1777 tmpfs /dev/shm",
        f"mount -t tmpfs -o size=256m,mode=0700,uid={os.getuid()} tmpfs /tmp/allspan-{os.getuid()}",
        f"mount --bind {names} /etc/hosts",
        "ip link set lo up",
    ]
    own_pids = [] if "hosta" in name else ["--pid", "--fork", "--kill-child", "--mount-proc"]
    return _unshare(switch, ["--net", "--uts", "--mount", "--ipc", *own_pids], "\n".join(setup))


def _connect(switch: int, holder: subprocess.Popen[Any], name: str, address: str) -> Host:
    init = _first_process(holder)
    port = f"port-{name[:5]}"
    _in_net(
        switch,
        f"ip link add {port} type veth peer name eth0 netns /proc/{init}/ns/net",
        f"ip link set {port} master bridge",
        f"ip link set {port} up",
    )
    _in_net(init, f"ip addr add {address}/24 dev eth0", "ip link set eth0 up")
    return Host(name, address, holder.pid, init, _inner_pid(init, switch), port, switch, _namespace(init, "net"))


def _unshare(switch: int | None, namespaces: list[str], setup: str) -> subprocess.Popen[Any]:
    """Starts the first process of new namespaces and waits until it is ready; the outermost dies with this thread."""
    words = ["unshare", *namespaces, "--propagation", "private", "sh", "-e", "-c", f"{setup}\n{_INIT}"]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": -1, "stderr": -1, "start_new_session": True}
    try:
        if switch is None:
            holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], **options)
        else:
            holder = _popen(switch, words, options, NAMESPACES[-1:])
        assert holder.stdout is not None
        assert holder.stderr is not None
        with holder.stdout, holder.stderr:
            if holder.stdout.readline() == b"ready\n":
                return holder
            holder.kill()
            reason = holder.stderr.read().decode(errors="replace").strip()
            holder.wait()
    except OSError as error:  # no unshare of util-linux
        reason = str(error)
    pytest.skip(f"root: needs network, PID and mount namespaces: {reason}")


def _popen(
    target: int, words: Sequence[str], options: dict[str, Any], namespaces: Sequence[str] = NAMESPACES
) -> subprocess.Popen[Any]:
    """Starts a command in the namespaces of the process `target`.

    Without a preexec_fn, which makes Python fork where it otherwise calls vfork: gRPC starts threads after a fork, and
    this thread cannot have any while its children are to be in another PID namespace.
    """
    folder = str(options.pop("cwd", None) or os.getcwd())  # which entering a mount namespace forgets
    enter = ["nsenter", "-t", str(target), *(f"--{name}" for name in namespaces), "--", "sh", "-c"]
    theirs = os.open(f"/proc/{target}/ns/pid", os.O_RDONLY)
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _setns(theirs)  # for what this thread starts
        try:
            return subprocess.Popen([*enter, 'cd "$0" && exec "$@"', folder, *words], **options)
        finally:
            _setns(ours)
    finally:
        os.close(theirs)
        os.close(ours)


def _setns(file: int) -> None:
    if _libc.setns(file, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def _first_process(holder: subprocess.Popen[Any]) -> int:
    """The process that says "ready": `holder`, or its only descendant without children."""
    pid = holder.pid
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


def _inner_pid(pid: int, switch: int) -> int:
    """Returns the number that a process has in the PID namespace of the first host, which the switch has, too."""
    depth = len(_pids(switch))
    return _pids(pid)[depth - 1]


def _pids(pid: int) -> list[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(word) for line in lines if line.startswith("NSpid:") for word in line.split()[1:]]


def _write_remote_shell(folder: Path, switch: int, hosts: Sequence[Host]) -> Path:
    """A script with sshd's manners: options are skipped, one string for /bin/sh, a new environment, the home folder."""
    cases = "\n".join(f"  {h.name}|{h.address}) outer={h.init} inner={h.inner_init} ;;" for h in hosts)
    file = folder / "remote-shell"
    file.write_text(f"""#!/bin/sh
while :; do case $1 in -[opliF]) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=$1; shift
case $host in
{cases}
  *) echo "remote-shell: there is no host $host" >&2; exit 255 ;;
esac
case $(readlink /proc/self/ns/pid) in
  '{_namespace(switch, "pid")}') pid=$inner ;;
  '{_namespace(os.getpid(), "pid")}') pid=$outer ;;
  *) echo "remote-shell: only the first host and the test may enter $host" >&2; exit 255 ;;
esac
exec nsenter -t "$pid" -u -n -m -i -p -- env -i HOME={shlex.quote(str(Path.home()))} USER=root SHELL=/bin/sh \\
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /bin/sh -c 'cd; eval "$1"' sh "$*"
""")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def _drop(pid: int, device: str, dropped: bool) -> None:
    """A queue without room loses whatever the device should send."""
    _in_net(pid, f"tc qdisc {'replace' if dropped else 'del'} dev {device} root {'pfifo limit 0' if dropped else ''}")


def _in_net(pid: int, *commands: str) -> None:
    for command in commands:
        words = ["nsenter", "-t", str(pid), "-n", "--", *command.split()]
        run = subprocess.run(words, capture_output=True, text=True)
        if run.returncode != 0 and "not supported" in run.stderr:
            pytest.skip(f"root: needs a kernel with bridge and veth: {command}: {run.stderr}")
        assert run.returncode == 0, f"{command}: {run.stderr}"


def _namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def _users(inode: str) -> set[int]:
    """The processes that are in a network namespace."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _namespace(int(entry.name), "net") == inode:
                found.add(int(entry.name))
    return found
