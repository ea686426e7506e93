"""Progress of a download that another program makes: the growth of its folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from allspan.protos.cluster.progress import Progress

POLL_S = 0.2


@contextmanager
def shown(title: str, done: Callable[[], int], total: int = 0) -> Iterator[None]:
    """Shows the bytes that `done` returns while the block runs; `total` is 0 where it is not known."""
    over = threading.Event()

    def watch() -> None:
        with Progress(title, total) as progress:
            while not over.wait(POLL_S):
                progress(min(done(), total) if total else done())

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
