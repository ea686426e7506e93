"""The backends and instruction sets over which a test of kernels is repeated."""

from __future__ import annotations

from typing import Any

import pytest

from allspan.kernels.table import backends

CPU = [name for name in backends() if name.startswith("cpu/")]
"""The instruction sets that this machine can run, best first."""


def _param(name: str) -> Any:
    """Returns the name, marked nightly for a set between the best one and the generic one."""
    return pytest.param(name, marks=pytest.mark.nightly) if name in CPU[1:-1] else name


VARIANTS = [_param(name) for name in backends()]
CPU_VARIANTS = [_param(name) for name in CPU]
