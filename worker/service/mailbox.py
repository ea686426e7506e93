"""From the step loop's thread to an asyncio loop, without stopping for it.

`loop.call_soon_threadsafe` wakes the other thread by a system call that gives up the interpreter's lock; the thread
that wakes takes it, and the step loop waits (0.4 ms a step were measured on two processors). Here the bell is rung with
the lock kept, so the other thread runs when the step loop is next inside a kernel.

The woken thread takes a processor, and so does all that follows it, up to the reader of the tokens. Where the step's
own threads have all processors (1.3 ms a token were measured for a lone stream), there is a pause after a delivery, and
what can wait goes on together at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_ONE = (1).to_bytes(8, "little")


class Mailbox(Generic[T]):
    """`post` from one thread; `deliver` is called with each value, in order, on the loop that `open` was called on."""

    def __init__(
        self, deliver: Callable[[T], None], is_urgent: Callable[[T], bool], release: Callable[[], float]
    ) -> None:
        """A value that is urgent is delivered at once, with all that came before it; others are no later than the next
        `release`, which lets go on what could wait, and says for how many seconds from then on new values can."""
        self._deliver = deliver
        self._is_urgent = is_urgent
        self._release = release
        self._is_pausing = False
        self._values: deque[T] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # PyDLL, unlike CDLL, keeps the interpreter's lock; the write cannot block.
        self._write = ctypes.PyDLL(None).write
        self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        self._write.restype = ctypes.c_ssize_t

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._bell, self._on_bell)

    def post(self, value: T) -> None:
        """Returns at once. What is posted after `close` is dropped."""
        self._values.append(value)
        if self._bell >= 0 and (not self._is_pausing or self._is_urgent(value)):
            self._write(self._bell, _ONE, len(_ONE))

    def flush(self) -> None:
        """Delivers what has been posted; on the loop."""
        while self._values:
            self._deliver(self._values.popleft())

    def close(self) -> None:
        """On the loop, after the last `flush`."""
        bell, self._bell = self._bell, -1
        asyncio.get_running_loop().remove_reader(bell)
        os.close(bell)

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):  # rung once more while the last one was answered
            os.eventfd_read(self._bell)
        self.flush()
        if not self._is_pausing:
            self._release_and_pause()

    def _release_and_pause(self) -> None:
        if (pause_s := self._release()) > 0:
            self._is_pausing = True
            asyncio.get_running_loop().call_later(pause_s, self._end_pause)

    def _end_pause(self) -> None:
        self._is_pausing = False  # first: what is posted from here on rings the bell
        self.flush()
        self._release_and_pause()
