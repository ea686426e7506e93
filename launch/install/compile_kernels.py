"""Compiling the CUDA kernels ahead of their first use. The kernels' own process does it; it needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allspan.protos.api.errors import ConfigError, DeadlineExceeded, InternalError, Unavailable

TIMEOUT_S = 1800


@dataclass(frozen=True)
class Warmed:
    """The result for one architecture: how many sources (with their macros) were compiled now, and how many were in the
    cache."""

    architecture: str
    compiled: int
    found: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Warming:
    """The result of a warm-up of the kernel cache."""

    compiler: str
    folder: Path
    architectures: tuple[Warmed, ...]


def warm(architectures: Sequence[str]) -> Warming:
    """Compiles the kernels for these architectures, or for this machine's GPUs if none is named. Its progress goes to
    this terminal.

    Raises ConfigError for an architecture that is not known, Unavailable without a compiler, without a GPU where none
    is named, and for a source that does not compile.
    """
    words = [sys.executable, "-m", "allspan.kernels", "compile", "--", *architectures]
    try:
        run = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"compiling kernels took more than {TIMEOUT_S} s") from error
    try:
        said = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise InternalError(f"compiling kernels ended with code {run.returncode} and said nothing") from None
    if "refused" in said:
        raise ConfigError(f"--arch: {said['refused']}")
    if "error" in said:
        raise Unavailable(said["error"])
    found = tuple(Warmed(name, **figures) for name, figures in said["architectures"].items())
    return Warming(said["compiler"], Path(said["folder"]), found)
