"""What is timed: a case builds its inputs, and says how each side launches over them and what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

L2_BYTES = 120 << 20
"""Inputs of all launches of a round together exceed this, so that no cache holds them; H200s have 60 MB."""
MOST_SETS = 64

Launch = Callable[[int], object]
"""Launches over the inputs of this number; can be captured into a graph."""


@dataclass(frozen=True)
class Built:
    """A case whose inputs are on the device."""

    ours: Mapping[str, Launch]
    """The launches of this project by the name of the kernel; the fastest counts."""
    check: Callable[[str], None]
    """Launches one of ours over the first inputs and raises AssertionError where its result is wrong."""
    sets: int
    """The number of sets of inputs that take turns."""
    num_bytes: int
    """The bytes that a launch has to move at least."""
    flops: int = 0
    peers: Mapping[str, Callable[[], Launch]] = field(default_factory=dict)
    """Each prepares a side (plans, warms up); one that raises is told as refused."""
    kernel: str = ""
    """The kernel that was chosen, where there are several for one op."""


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    build: Callable[[str], Built]
    """Builds the case on a device. Raises what the device lacks: memory, say."""
    num_bytes: int = 0
    """Memory of the inputs; what does not fit into half of the GPU's is left out."""


def sets_for(num_bytes: int) -> int:
    """How many inputs of this size take turns."""
    return max(1, min(MOST_SETS, -(-L2_BYTES // max(1, num_bytes))))
