"""SideCopies: what goes to a device's memory from a thread beside the one that runs the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class SideCopies(Protocol):
    """Copies to memory that no step reads or writes between `after_steps` and `before_steps`, which the thread of the
    steps calls."""

    def after_steps(self) -> None:
        """What is run from now on comes after the steps that were launched until now."""

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work`, which copies, from any thread."""

    def before_steps(self) -> None:
        """Steps that are launched from now on come after what was run until now."""


class HostCopies:
    """A SideCopies of host memory, where a copy and a step are over when they return."""

    def after_steps(self) -> None:
        pass

    def run(self, work: Callable[[], None]) -> None:
        work()

    def before_steps(self) -> None:
        pass
