"""The memory that a process keeps for what it does again and again."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROUNDS = """
import resource
import numpy as np
from allspan.worker.process.release_memory import keep_freed_memory

def one_round():
    pieces = [np.ones(2**20) for _ in range(3)]

keep_freed_memory()
one_round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    one_round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's limits")
def test_memory_that_is_freed_and_taken_again_costs_no_page_faults() -> None:
    faults = subprocess.run([sys.executable, "-c", ROUNDS], check=True, capture_output=True, text=True, timeout=60)
    assert int(faults.stdout) < 100  # 15,000 with the limits that a process begins with
