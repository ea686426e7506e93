"""A running cluster's two folders: the run directory (sockets, cluster.json) and the one for MPI's shared memory files.

The supervisor holds a lock on `RUN_DIR/lock` until it ends: a folder whose lock is free belongs to a dead cluster.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allspan.launch.console import size
from allspan.launch.supervision import reaper
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.cluster_file import replica_dir, socket_path

SHM = Path("/dev/shm")
LOCK_FILE = "lock"
MAX_SOCKET_PATH = 100
"""Bytes; the kernel's limit for a unix socket's path is 107."""
MIN_SHM_BYTES = 24 << 20
"""Least free bytes for shared memory: MPI makes files of some MiB per rank there, mostly holes, and without room it
ends by a signal or without a message."""
MIN_RUN_BYTES = 1 << 20


@dataclass(frozen=True)
class RunDir:
    """`path` and `shm` exist with mode 0700 while `lock_fd` is open; `remove` takes both away."""

    path: Path
    shm: Path
    lock_fd: int

    def remove(self) -> None:
        """Removes both folders, then lets go of the lock. Processes of the cluster must be gone."""
        self.erase()
        os.close(self.lock_fd)

    def erase(self) -> None:
        """Removes both folders. Idempotent."""
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def replica(self, index: int) -> RunDir:
        """Makes both folders of one replica, below these; they go with them, and are never to be `remove`d."""
        part = RunDir(replica_dir(self.path, index), self.shm / f"replica-{index}", self.lock_fd)
        for folder in (part.path, part.shm):
            folder.mkdir(mode=0o700)
        return part

    def clear_shm(self) -> None:
        """Removes the files of an ended world from the shared-memory folder; the folder and its owner's name stay."""
        for entry in self.shm.iterdir():
            if entry.name == reaper.OWNER_FILE:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def base_dir(environ: Mapping[str, str] = os.environ, replicas: int = 1) -> Path:
    """Returns the parent of this user's run directories: $XDG_RUNTIME_DIR/allspan, else /tmp/allspan-UID; made with
    mode 0700.

    The variable counts if it names a folder that can be written to and leaves room for a socket's path.
    Raises ConfigError when the folder belongs to somebody else or others may write to it.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    path = Path(runtime) / "allspan"
    usable = os.path.isabs(runtime) and os.path.isdir(runtime) and os.access(runtime, os.W_OK | os.X_OK)
    if not usable or _longest_socket(path / _new_name(), replicas) > MAX_SOCKET_PATH:
        path = Path(f"/tmp/allspan-{os.getuid()}")
    _make_private(path)
    return path


def make_run_dir(
    wanted: str = "", environ: Mapping[str, str] = os.environ, shm: Path = SHM, replicas: int = 1
) -> RunDir:
    """Makes and locks both folders, in `wanted` or under `base_dir()`, after removing those of ended clusters.

    Where only `wanted` can be written to, those of dead clusters wait for a start that may remove them.
    Raises ConfigError when `wanted` is in use, holds foreign files, or makes a socket path that is too long, and when
    a folder cannot be written to or its disk is full.
    """
    try:
        base = base_dir(environ, replicas)
        guard = _lock(base / ".lock", wait_s=10.0)
    except ConfigError:
        if not wanted:
            raise
        return _make(Path(wanted).absolute(), shm, replicas)
    if guard is None:
        raise ConfigError(f"{base / '.lock'} is held by another start for more than 10 s; try again")
    try:
        remove_stale(base, shm)
        path = Path(wanted).absolute() if wanted else base / _new_name()
        return _make(path, shm, replicas)
    finally:
        os.close(guard)


def remove_stale(base: Path, shm: Path = SHM) -> list[Path]:
    """Ends leftover processes of clusters whose supervisor has ended and removes their folders; returns the run
    directories.

    Everybody may write to `shm`: only folders of this user count, and they point at nothing but run directories.
    """
    owners = {path: reaper.owner_of(path) for path in shm.glob(f"allspan-{os.getuid()}-*") if _is_own(path)}
    shms = {owner: path for path, owner in owners.items() if owner}
    run_dirs = {str(path) for path in base.iterdir() if path.is_dir()} | set(shms)
    removed = []
    for run_dir in sorted(run_dirs):
        folder = str(shms[run_dir]) if run_dir in shms else ""
        if Path(run_dir).is_dir() and (Path(run_dir).parent == base or (Path(run_dir) / LOCK_FILE).is_file()):
            lock = _lock(Path(run_dir) / LOCK_FILE)
            if lock is None:
                continue  # alive
            reaper.clean(run_dir, folder)
            os.close(lock)
        elif folder:
            # Its run directory is gone, or a folder of another kind lies there now.
            reaper.kill(run_dir)
            shutil.rmtree(folder, ignore_errors=True)
        removed.append(Path(run_dir))
    for path in (path for path, owner in owners.items() if not owner):
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _make(path: Path, shm: Path, replicas: int) -> RunDir:
    longest = _longest_socket(path, replicas)
    if longest > MAX_SOCKET_PATH:
        raise ConfigError(
            f"--run-dir {path} makes socket paths of {longest} bytes, at most {MAX_SOCKET_PATH}; take a shorter one"
        )
    foreign = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if foreign and LOCK_FILE not in foreign:
        raise ConfigError(f"--run-dir {path} holds other files ({foreign[0]}); take an empty or new folder")
    _make_private(path)
    lock = _lock(path / LOCK_FILE)
    if lock is None:
        raise ConfigError(f"--run-dir {path} is in use by another cluster")
    try:
        if others := [name for name in foreign if name != LOCK_FILE]:
            raise ConfigError(f"--run-dir {path} holds other files ({others[0]}); take an empty or new folder")
        try:
            return RunDir(path, _make_shm(path, shm), lock)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    except BaseException:
        os.close(lock)
        raise


def _make_shm(run_dir: Path, shm: Path) -> Path:
    """Makes the shared-memory folder and its owner file in one step: a concurrent start may be looking for stale
    folders."""
    _check_room(run_dir, MIN_RUN_BYTES, "free some, or set XDG_RUNTIME_DIR or --run-dir to another disk")
    usable = shm.is_dir() and os.access(shm, os.W_OK)
    if usable:
        way_out = "remove files there; docker run --shm-size=1g gives a container more (Kubernetes: an emptyDir of "
        _check_room(shm, MIN_SHM_BYTES, f"{way_out}medium Memory)")
    folder = shm / f"allspan-{os.getuid()}-{secrets.token_hex(4)}" if usable else run_dir / "shm"
    unnamed = folder.with_name(f".{folder.name}")
    unnamed.mkdir(mode=0o700)
    (unnamed / reaper.OWNER_FILE).write_text(str(run_dir), encoding="utf-8")
    unnamed.rename(folder)
    return folder


def _check_room(folder: Path, least: int, way_out: str) -> None:
    if (free := shutil.disk_usage(folder).free) < least:
        raise ConfigError(f"{folder} has {size(free)} free, must be at least {size(least)}: {way_out}")


def _new_name() -> str:
    return secrets.token_hex(3)


def _longest_socket(run_dir: Path, replicas: int) -> int:
    """Bytes."""
    part = run_dir if replicas == 1 else replica_dir(run_dir, replicas - 1)
    return len(os.fsencode(socket_path(part, 9999, 9999)))


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}; set XDG_RUNTIME_DIR or --run-dir") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{path} must be a folder of this user that others cannot write to; set XDG_RUNTIME_DIR")
    if status.st_mode & 0o077:
        path.chmod(0o700)


def _lock(path: Path, wait_s: float = 0.0) -> int | None:
    """Returns a descriptor that holds the file's lock, or None when another process still holds it after `wait_s`.

    Raises ConfigError when the file cannot be made.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}; set XDG_RUNTIME_DIR or --run-dir") from error
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(handle)
                return None
            time.sleep(0.02)
