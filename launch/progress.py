"""Progress of something that takes long: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from allspan.launch.console import is_terminal, say, size

POLL_S = 0.2
LINE_EVERY_S = 15.0
"""Seconds between lines where there is no terminal."""


@contextmanager
def shown(title: str, done: Callable[[], int], total: int = 0) -> Iterator[None]:
    """Shows the bytes that `done` returns while the block runs; `total` is 0 where it is not known."""
    over = threading.Event()
    work = _draw if is_terminal() else _tell
    thread = threading.Thread(target=work, args=(title, done, total, over), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _draw(title: str, done: Callable[[], int], total: int, over: threading.Event) -> None:
    from tqdm import tqdm

    with tqdm(
        desc=title, total=total or None, unit="B", unit_scale=True, unit_divisor=1024, leave=False, file=sys.stderr
    ) as bar:
        while not over.wait(POLL_S):
            bar.update(max(0, done() - bar.n))


def _tell(title: str, done: Callable[[], int], total: int, over: threading.Event) -> None:
    begun = time.monotonic()
    while not over.wait(LINE_EVERY_S):
        of = f" of {size(total)}" if total else ""
        say(f"{title}: {size(min(done(), total or done()))}{of} after {time.monotonic() - begun:.0f} s")
