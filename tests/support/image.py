"""Images built and run without a container daemon: a Dockerfile's steps in a chroot and namespaces of their own.

A stage is an overlay file system over a base made by debootstrap and this Python's standard library, which stand for
`python:X-slim-bookworm`: Docker's own base image, its layers and its runtime are not proved by this. RUN has the
machine's network, package index settings and certificates; a container has a network of its own, with loopback alone.
Mounts are made inside each command's mount namespace: nothing stays mounted, whatever ends the test.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.dockerfile import assignments, expand, instructions, sent, words
from support.waiting import wait_until

PACKAGES = (
    "ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,"
    "netbase,tzdata,zlib1g"
)
"""What Python's modules are linked with, as in the slim image."""
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
NETWORK = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--propagation", "private")
_SYSTEM = """
mount -t proc proc "$root/proc"
mount --rbind -o ro /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm"
for name in null zero full random urandom; do touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
"""


@dataclass
class Stage:
    """The file system and the settings that the instructions after one FROM make; `folder` holds its overlay."""

    folder: Path
    base: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    settings: dict[str, str] = field(default_factory=dict)
    """The last of each instruction that only describes the container: USER, ENTRYPOINT, CMD and the like."""

    def __post_init__(self) -> None:
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def mount(self, options: str = "rw") -> str:
        """Shell lines that mount it as $root."""
        layers = f"lowerdir={self.base},upperdir={self.folder}/upper,workdir={self.folder}/work"
        return f"root={self.root}\nmount -t overlay -o {layers},{options} overlay $root\n"

    def command(self, name: str) -> list[str]:
        return words(self.settings[name])


def python_base(folder: Path) -> Path:
    """Makes what stands for python:X-slim-bookworm; skips the test where that cannot be."""
    if os.getuid() != 0:
        pytest.skip("root: needs chroot, mount namespaces and debootstrap")
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap: not installed")
    targets = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True)
    mirrors = [line for line in targets.stdout.splitlines() if line.rstrip("/").endswith("/debian")]
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder), *mirrors[:1]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr
    for name in ("apt.conf.d", "auth.conf.d"):  # how this machine reaches its mirror
        shutil.copytree(f"/etc/apt/{name}", folder / "etc/apt" / name, dirs_exist_ok=True)
    prefix, local = Path(sys.base_prefix), folder / "usr/local"
    left_out = shutil.ignore_patterns("site-packages", "__pycache__", "test", "tests", "*.a")
    for name in (f"lib/python{PYTHON}", f"include/python{PYTHON}"):
        shutil.copytree(prefix / name, local / name, ignore=left_out, symlinks=True, dirs_exist_ok=True)
    (local / f"lib/python{PYTHON}/site-packages").mkdir()
    for library in prefix.glob("lib/libpython*.so*"):
        shutil.copy(library, local / "lib", follow_symlinks=False)
    shutil.copy(os.path.realpath(prefix / f"bin/python{PYTHON}"), local / f"bin/python{PYTHON}")
    for name in ("python", "python3"):
        (local / "bin" / name).symlink_to(f"python{PYTHON}")
    subprocess.run(["chroot", str(folder), "ldconfig"], check=True, timeout=60)
    return folder


def index_settings() -> tuple[dict[str, str], list[str]]:
    """How this machine's pip finds packages, as variables, and the local paths that they name."""
    env = {name: os.environ[name] for name in NETWORK if name in os.environ}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        env["PIP_" + name.rpartition(".")[2].upper().replace("-", "_")] = value.strip("'")
    env.pop("PIP_CERT", None)
    if CERTIFICATES.exists():
        env["PIP_CERT"] = env["SSL_CERT_FILE"] = str(CERTIFICATES)
    # An index names its files beside itself: ../files.
    named = (word.removeprefix("file://").removesuffix("/simple") for value in env.values() for word in value.split())
    return env, sorted({word for word in named if word.startswith("/") and Path(word).exists()})


@dataclass
class Builder:
    """Executes the steps of a Dockerfile as `docker build` does, with `arguments` as its --build-arg."""

    context: Path
    folder: Path
    base: Path
    arguments: Mapping[str, str]
    constraint: str
    """A line of a constraints file for the whole build: one version of torch that the index here has."""

    def build(self, dockerfile: Path) -> Stage:
        """Returns the last stage."""
        stages: dict[str, Stage] = {}
        common: dict[str, str] = {}
        stage: Stage | None = None
        for word, rest in instructions(dockerfile):
            if word == "FROM":
                image, _, name = expand(rest, common).partition(" AS ")
                assert image == f"python:{PYTHON}-slim-bookworm", image
                stage = Stage(self.folder / str(len(stages)), self.base)
                stages[name or str(len(stages))] = stage
            elif word == "ARG":
                given = assignments(rest, common) | {k: v for k, v in self.arguments.items() if k == rest.split("=")[0]}
                (stage.arguments if stage else common).update(given)
            else:
                assert stage is not None
                self._step(stage, stages, word, rest)
        assert stage is not None
        return stage

    def _step(self, stage: Stage, stages: Mapping[str, Stage], word: str, rest: str) -> None:
        values = stage.arguments | stage.env
        if word == "RUN":
            self._run(stage, rest)
        elif word == "COPY":
            self._copy(stage, stages, shlex.split(expand(rest, values)))
        elif word == "ENV":
            stage.env |= assignments(rest, values)
        elif word == "WORKDIR":
            stage.workdir = os.path.join(stage.workdir, expand(rest, values))
            self._shell(stage, f'mkdir -p "$root{stage.workdir}"')
        else:
            assert word in ("USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"), word
            stage.settings[word] = expand(rest, values) if word in ("USER", "EXPOSE") else rest

    def _run(self, stage: Stage, command: str) -> None:
        assert "USER" not in stage.settings, "steps of another user are not written here"
        env, folders = index_settings()
        (stage.folder / "constraint.txt").write_text(self.constraint + "\n")
        binds = [(path, path) for path in (*folders, "/etc/resolv.conf", "/etc/hosts")]
        binds += [(f"{stage.folder}/constraint.txt", "/run/constraint.txt")]
        lines = [bind(*pair) for pair in binds]
        env |= {"HOME": "/root", "PIP_CONSTRAINT": "/run/constraint.txt"} | stage.env | stage.arguments
        given = ["env", "-i", "-C", stage.workdir, *(f"{name}={value}" for name, value in env.items())]
        self._shell(stage, _SYSTEM + "\n".join(lines), ["chroot", str(stage.root), *given, "/bin/sh", "-c", command])

    def _copy(self, stage: Stage, stages: Mapping[str, Stage], given: list[str]) -> None:
        options = dict(word[2:].split("=", 1) for word in given if word.startswith("--"))
        *sources, target = (word for word in given if not word.startswith("--"))
        assert options.keys() <= {"from", "chown"}
        assert len(sources) == 1
        staged = self.folder / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        if name := options.get("from"):
            before = stages[name].mount()
            source = f"{stages[name].root}{sources[0]}"
        else:
            before, source = "", str(staged / sources[0])
            files = list(sent(self.context, sources[0]))
            assert files, f"COPY {sources[0]}: nothing of it reaches the builder"
            for file in files:
                (staged / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.context / file, staged / file)
        place = stage.workdir if not target.startswith("/") else "/"
        target = f"{stage.root}{os.path.join(place, target)}"
        lines = [
            f"mkdir -p {shlex.quote(os.path.dirname(target))}",
            f"if [ -d {source} ]; then mkdir -p {target}; source={source}/.; else source={source}; fi",
            f"cp -a --no-preserve=ownership $source {target}",
            f"chown -R {options.get('chown', '0:0')} {target}",
        ]
        self._shell(stage, "\n".join(lines), before=before)

    def _shell(self, stage: Stage, setup: str, command: Sequence[str] = ("true",), before: str = "") -> None:
        script = f'{before}{stage.mount()}{setup}\nexec "$@"'
        run = subprocess.run(
            [*_UNSHARE, "/bin/sh", "-e", "-c", script, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        assert run.returncode == 0, f"{shlex.join(command)}: {run.returncode}\n{run.stdout[-5000:]}"


def bind(source: str, target: str, options: str = "") -> str:
    """Shell lines that mount a file or folder of this machine below $root."""
    made = "mkdir -p" if Path(source).is_dir() else 'mkdir -p "$(dirname "$root' + target + '")"; touch'
    return f'{made} "$root{target}"; mount --bind {options} {shlex.quote(source)} "$root{target}"'


@dataclass
class Container:
    """A running image: `pid` is its first process as this machine numbers it."""

    process: subprocess.Popen[str]
    pid: int
    stage: Stage

    def exec(self, command: Sequence[str], timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, as its user, as `docker exec` and HEALTHCHECK do."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "-i", "-u", "-r", "--"]
        full = [*enter, *_as_user(self.stage, {}), *command]
        return subprocess.run(full, capture_output=True, text=True, timeout=timeout)

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)


def _as_user(stage: Stage, env: Mapping[str, str]) -> list[str]:
    """No capability, no new privileges, the image's user, environment and folder."""
    user, _, group = stage.settings["USER"].partition(":")
    drop = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    given = stage.env | {"HOME": "/"} | env
    folder = ["env", "-i", "-C", stage.workdir]
    return [*drop, "--inh-caps=-all", *folder, *(f"{name}={value}" for name, value in given.items())]


@contextmanager
def container(stage: Stage, log: Path, command: Sequence[str], **env: str) -> Iterator[Container]:
    """Starts the image's entrypoint with `command`: read-only, /tmp and /dev/shm in memory, the image's volume kept.

    As compose.yaml does: 1 GB of shared memory, no capability, no new privileges; loopback is its only network.
    """
    volume = stage.settings["VOLUME"]
    kept = stage.folder / "volume"
    setup = stage.mount() + _SYSTEM + bind(str(kept), volume)
    setup += """
mount -t tmpfs -o mode=1777,size=1g tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -o remount,ro "$root"
ip link set lo up
exec "$@"
"""
    inner = [*_as_user(stage, env), *stage.command("ENTRYPOINT"), *command]
    full = [*_UNSHARE, "--net", "/bin/sh", "-e", "-c", setup, "sh", "chroot", str(stage.root), *inner]
    with log.open("w") as out:
        process: subprocess.Popen[str] = subprocess.Popen(full, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield Container(process, _child(process, log), stage)
    finally:
        process.kill()  # unshare --kill-child ends the container with it
        process.wait(timeout=30)


def _child(process: Any, log: Path) -> int:
    found: list[str] = []

    def started() -> bool:
        assert process.poll() is None, log.read_text()
        found[:] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return bool(found) and os.readlink(f"/proc/{found[0]}/root") != "/"

    wait_until(started, what="the container's first process")
    return int(found[0])
