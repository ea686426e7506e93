"""Work that the event loop does itself while it is short, and hands to a thread when it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

INLINE_CHARS = 8192
"""Shorter texts are tokenised on the event loop: a thread's hand-over costs more than they do."""

P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the function's result, run on a thread if it is large. `size` is the number of characters, or of units
    that take as long."""
    if size <= INLINE_CHARS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
