"""What can be wrong with a backend."""

from __future__ import annotations


class BackendUnavailable(RuntimeError):
    """This machine, or this installation, cannot run the backend; the message says why and what would help."""


class StaleModule(RuntimeError):
    """The compiled module was made from other sources than those beside it; the message says how to compile it."""
