"""Faults from inside a rank, which no signal can cause: a test's code in a rank's process, never the product's.

The code goes into a `sitecustomize.py` on PYTHONPATH, which every Python of the cluster runs at its start; only the
rank that is meant takes notice.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

_HEAD = """
import os, sys

if "allspan.worker" in sys.orig_argv:
    from allspan.worker.process import host

    RANK, RANKS = host.place() or (0, 1)

    def due():
        # Once: whoever removes the file has been told.
        try:
            os.unlink({trigger!r})
        except FileNotFoundError:
            return False
        return True

    if RANK == {rank}:
"""

SLOW_STEPS = """
import time
from allspan.worker.models.model import Model

forward = Model.forward

def slow(self, *arguments):
    time.sleep(0.005)
    return forward(self, *arguments)

Model.forward = slow
"""
"""Five milliseconds a step, so that streams last long enough on any machine."""


@dataclass(frozen=True)
class Fault:
    """`env` goes to the cluster's process. The fault happens, once, at the rank's next chance after `fire`."""

    env: dict[str, str]
    trigger: Path

    def fire(self) -> None:
        self.trigger.touch()

    @property
    def has_happened(self) -> bool:
        """After `fire`."""
        return not self.trigger.exists()


def make_fault(folder: Path, rank: int, code: str) -> Fault:
    """`code` runs as rank `rank` starts, and patches what it likes to ask `due()`: True once, after `fire`."""
    folder.mkdir()
    trigger = folder / "now"
    head = _HEAD.format(trigger=str(trigger), rank=rank)
    (folder / "sitecustomize.py").write_text(head + textwrap.indent(textwrap.dedent(code), " " * 8))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Fault({"PYTHONPATH": os.pathsep.join(paths)}, trigger)
