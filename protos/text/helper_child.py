"""The child's side of `helper_process`: answers questions, a JSON object a line, within limits that it sets itself."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from typing import Any


def questions() -> Iterator[dict[str, Any]]:
    """The questions, until the parent closes or is no more."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def reply(answer: dict[str, Any]) -> None:
    """Answers the last question."""
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def limit_memory(more_bytes: int) -> None:
    """Lets this process map `more_bytes` more than it has, and write no file."""
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(what, (0, 0))
    if (mapped := _mapped_bytes()) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, mapped + more_bytes))


def _mapped_bytes() -> int | None:
    """Returns the mapped bytes of this process, used or not; None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None
