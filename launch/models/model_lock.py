"""The lock of a model in the models folder: one process at a time fetches or removes it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from allspan.launch.console import say
from allspan.protos.api.errors import DeadlineExceeded

LOCK_TIMEOUT_S = 3600.0
"""Seconds that a second process waits for the first to finish its download."""
LOCK_POLL_S = 0.1


def lock_path(model: Path) -> Path:
    """Returns the file beside the model that is locked."""
    return model.parent / f".{model.name.removesuffix('.gguf')}.lock"


@contextmanager
def locked(model: Path) -> Iterator[None]:
    """Holds a model's lock; a second process waits for the first and then finds the model.

    Raises DeadlineExceeded after LOCK_TIMEOUT_S.
    """
    path = lock_path(model)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    is_told = False
    while True:
        with _held(path) as is_held:
            if is_held:
                yield
                return
        if not is_told:
            say("another process is fetching this model; waiting for it")
            is_told = True
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"another process has been fetching this model for {LOCK_TIMEOUT_S:g} s (it holds {path}); "
                "end it and try again"
            )
        time.sleep(LOCK_POLL_S)


@contextmanager
def locked_at_once(model: Path) -> Iterator[bool]:
    """Holds a model's lock and yields True, or yields False when another process holds it."""
    with _held(lock_path(model)) as is_held:
        yield is_held


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        yield _try_lock(file) and _is_still(file, path)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(file: IO[str], path: Path) -> bool:
    """Returns whether `path` is the open file still: a removed model's lock is removed with it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
