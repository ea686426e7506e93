"""A world's two folders on one host, with names that its supervisor has chosen on another one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from allspan.launch.hosts import fence, rank_shell
from allspan.launch.supervision import reaper, run_dir
from allspan.protos.api.errors import ConfigError

IN_CLOSE_WRITE, IN_MOVED_TO = 0x8, 0x80


class HostFolders:
    """The run directory and the shared-memory folder, made with mode 0700 and locked while this object is open; or
    adopted from a supervisor on the same host, which removes them itself."""

    def __init__(self, path: Path, shm: Path, adopt: bool) -> None:
        """Raises ConfigError when another cluster uses one of them, and OSError when they cannot be made."""
        self.path = path
        self.shm = shm
        self.adopted = adopt
        self._lock = -1
        if not adopt:
            self._make()
        alive = path / rank_shell.ALIVE
        alive.unlink(missing_ok=True)
        os.mkfifo(alive, 0o600)
        self._alive = os.open(alive, os.O_RDWR | os.O_NONBLOCK)
        self.watch_fd = _watch(path)

    def write(self, relative: str, text: str, mode: int) -> None:
        """Writes a file of the run directory, its folder included. Raises ConfigError for a path outside of it."""
        target = (self.path / relative).resolve()
        if not target.is_relative_to(self.path.resolve()) or target == self.path:
            raise ConfigError(f"file {relative!r} must be inside of the run directory")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(target)

    def clear(self, epoch: int) -> None:
        """Ends what is left of one epoch's world and removes its files."""
        fence.kill(str(self.path), str(self.shm))
        for pattern in (f"*.e{epoch}.*", f"*.e{epoch}"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        run_dir.RunDir(self.path, self.shm, self._lock).clear_shm()

    def remove(self) -> None:
        """Ends the world's processes and, unless they are adopted, removes the folders."""
        fence.clean(str(self.path), str(self.shm), self.adopted)
        for fd in (self._alive, self.watch_fd, self._lock):
            with suppress(OSError):
                os.close(fd)

    def _make(self) -> None:
        if self.path.parent == run_dir.base_dir():
            run_dir.remove_stale(self.path.parent)
        self._remove_left()
        self.path.mkdir(mode=0o700, parents=True)
        try:
            self._lock = os.open(self.path / rank_shell.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.shm.mkdir(mode=0o700, parents=True)
            (self.shm / reaper.OWNER_FILE).write_text(str(self.path), encoding="utf-8")
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _remove_left(self) -> None:
        """Removes folders that a keeper left which was killed together with its fence."""
        if self.path.exists():
            if not (self.path / rank_shell.LOCK).is_file():
                raise ConfigError(f"run directory {self.path} exists already and is no cluster's; take another")
            with open(self.path / rank_shell.LOCK, "rb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(f"run directory {self.path} is in use by another cluster") from None
        elif self.shm.exists() and reaper.owner_of(self.shm) != str(self.path):
            raise ConfigError(f"shared-memory folder {self.shm} exists already and is another cluster's")
        fence.clean(str(self.path), str(self.shm))


def _watch(path: Path) -> int:
    """Returns a descriptor that is readable when a file of the folder has been written or replaced (inotify)."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(path), IN_CLOSE_WRITE | IN_MOVED_TO) < 0:
        raise OSError(ctypes.get_errno(), f"inotify of {path}")
    return fd
