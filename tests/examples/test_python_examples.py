"""The Python examples and the notebook run to their end on the default model and show what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.default_model import default_model

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"

SHOWN = {
    "offline_batch.py": "20 prompt tokens, 96 generated tokens",
    "prefix_cache.py": "384 of 405 prompt tokens cached",
    "quantised_weights.py": "uint4",
    "streaming.py": "state after stop_request: cancelled",
    "structured_output.py": '"age":',
    "two_ranks.py": "rank 1:",
}
"""A part of what each example prints."""

# An engine in process has as many threads as it may use CPUs, and threads that wait for each other are slow where other
# tests want their CPU.
_ON_ONE_CPU = """
import os, runpy, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_every_example_is_tested() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_runs_to_its_end(name: str) -> None:
    how = [] if name == "two_ranks.py" else ["-c", _ON_ONE_CPU]
    words = [sys.executable, *how, str(FOLDER / name), str(default_model())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=os.environ | {"PYTHONSAFEPATH": "1"})
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout


def test_the_notebook_runs_cell_by_cell() -> None:
    cells = json.loads((FOLDER / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace('"SmolLM2-135M-Instruct"', repr(str(default_model())))
            exec(compile(source, cell["id"], "exec"), names)
    assert len(names["completions"]) == 2
    assert names["queue"].timings.cached_tokens > 0
