"""The priority of threads that work beside the steps."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def lower_priority(by: int) -> None:
    """Gives the calling thread a niceness `by` above that of the process, where threads have one of their own."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + by)
