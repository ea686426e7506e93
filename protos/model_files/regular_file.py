"""Opens the files of a model: regular ones alone, so that no reading waits for ever or never ends."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from allspan.protos.api.errors import CheckpointError

Opener = Callable[[Path], BinaryIO]
"""Opens a regular file for reading: `open_regular`, or one that opens fewer."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
_WAYS_OUT = {
    errno.ELOOP: "its symbolic links lead in a circle: replace them by the file",
    errno.ENOENT: "no such file, or a symbolic link to one that is not there: put it back, or fetch the model again",
    errno.ENXIO: "it is a socket or a device, must be a regular file",
}


def open_regular(path: Path) -> BinaryIO:
    """The file, opened for reading. Raises CheckpointError for what cannot be opened and for anything but a regular
    file (or a link to one): what is opened is what is checked, and opening a pipe does not wait for its writer."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS if test(mode)), "no file")
            raise CheckpointError(f"{path} is {kind}, must be a regular file: replace it by the model's own file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: Path, limit: int | None = None) -> int:
    """The length of a file in bytes. Raises CheckpointError as `open_regular` does, and for more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if limit is not None and size > limit:
        raise CheckpointError(f"{path} has {size} bytes, must have at most {limit}: it is not a model's own file")
    return size


def read_regular(path: Path, limit: int, opener: Opener = open_regular) -> bytes:
    """A file's content. Raises CheckpointError as `open_regular` does, and for a file of more than `limit` bytes."""
    with opener(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, must have at most {limit}: it is not a model's own file")
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise unreadable(path, error) from error
    if len(data) > limit:
        raise CheckpointError(f"{path} grew beyond {limit} bytes while it was read: let its writer finish first")
    return data


def read_text(path: Path, limit: int) -> str:
    """A file's content as text. Raises CheckpointError as `read_regular` does, and for what is not UTF-8."""
    data = read_regular(path, limit)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at {error.start}; save it as UTF-8"
        ) from error


def is_there(path: Path) -> bool:
    """Whether something has this name, be it a broken link: what is there must be readable. Raises CheckpointError for
    a folder that may not be searched."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return True


def names_in(folder: Path) -> list[str]:
    """Returns the sorted names in a folder. Raises CheckpointError for one that may not be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error of a file that the system does not give, with the way out."""
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if number in (errno.EACCES, errno.EPERM):
        way_out = f": allow user {os.geteuid()} to read it and to search its folders"
    else:
        way_out = f": {_WAYS_OUT[number]}" if number in _WAYS_OUT else ""
    return CheckpointError(f"{path}: cannot be read: {reason}{way_out}")
