"""The cache of what tests compile, install or fetch: $ALLSPAN_TEST_CACHE, by default ~/.cache/allspan/tests.

An entry's name holds a hash of everything that it was made of, so a changed source never finds an old entry. Processes
may ask for the same entry at once: one makes it, the others wait for it. Entries unused for 30 days are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from allspan.protos.config.home import home

FOLDER = Path(os.environ.get("ALLSPAN_TEST_CACHE") or home() / "tests").absolute()
MAX_AGE_S = 30 * 86400.0


def key(*parts: object) -> str:
    """A hash of the parts: of a path, the bytes of that file; of anything else, its repr."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        digest.update(f"{len(content)}\0".encode() + content)
    return digest.hexdigest()[:24]


def files_below(*places: Path) -> list[Path]:
    """All files of these folders in a fixed order, for `key`."""
    return sorted(file for place in places for file in place.rglob("*") if file.is_file())


def entry(kind: str, name: str, make: Callable[[Path], None], folder: Path = FOLDER) -> Path:
    """The file or folder `name` of this kind. `make` gets a path beside it to make it at when it is not there."""
    path = folder / kind / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _make_whole(path, make)
    use(path)
    return path


def use(path: Path) -> None:
    """Notes that the entry was used now."""
    with suppress(OSError):  # the folder may belong to another user
        os.utime(path)


def prune(folder: Path = FOLDER, max_age_s: float = MAX_AGE_S) -> None:
    """Removes the entries that were used last before `max_age_s`, and the locks and leftovers of as long ago."""
    for old in _older(folder.glob("*/*"), time.time() - max_age_s):
        _remove(old)


def _make_whole(path: Path, make: Callable[[Path], None]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    _remove(beside)
    try:
        make(beside)
        beside.rename(path)
    except BaseException:
        _remove(beside)
        raise


def _older(paths: Iterable[Path], limit: float) -> list[Path]:
    found = []
    for path in paths:
        with suppress(OSError):  # another process may have removed it
            if path.lstat().st_mtime < limit:
                found.append(path)
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
