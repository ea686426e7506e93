"""Only a device's own folder asks which device it is, and nobody probes for undeclared attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[2] / "worker"
FILES = sorted(path for path in WORKER.rglob("*.py") if WORKER / "backend" not in path.parents)
DEVICES = ("cuda", "cpu")
PROBED = ("ops", "collectives", "model", "backend", "sampling")


def asks_for_a_device(source: str) -> Iterator[int]:
    """Lines that compare with a device's name, look for one at a string's beginning, or use `torch.cuda`."""
    for node in ast.walk(ast.parse(source)):
        values: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            values = list(node.args)
        elif isinstance(node, ast.Attribute) and (ast.unparse(node) == "torch.cuda" or node.attr == "is_cuda"):
            yield node.lineno
        words = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        if any(word.partition("/")[0] in DEVICES for word in words):
            yield node.lineno


def probes(source: str) -> Iterator[int]:
    """Lines that ask ops, collectives or a model for an attribute by name."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in ("getattr", "hasattr") and ast.unparse(node.args[0]).strip("_").endswith(PROBED):
            yield node.lineno


def test_the_cuda_kernels_are_named_in_their_backend_alone() -> None:
    """Not as a module that a process runs, either."""
    folders = [WORKER.parent / name for name in ("worker", "client", "launch", "protos")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    named = [path for path in files if "kernels.cuda" in path.read_text()]
    assert {path.parent for path in named} == {WORKER / "backend" / "cuda"}


@pytest.mark.parametrize("find", [asks_for_a_device, probes])
def test_a_device_is_known_in_its_own_folder_alone(find) -> None:  # type: ignore[no-untyped-def]
    found = [f"{path.relative_to(WORKER)}:{line}" for path in FILES for line in find(path.read_text())]
    assert not found, f"{find.__doc__} Ask allspan.worker.step.backend.Backend instead."


@pytest.mark.parametrize(
    "source",
    ['device == "cuda"', 'name.startswith("cuda/")', 'device.type != "cpu"', "torch.cuda.synchronize()", "x.is_cuda"],
)
def test_what_asks_for_a_device_is_found(source: str) -> None:
    assert list(asks_for_a_device(source)) == [1]


@pytest.mark.parametrize("source", ['getattr(ops, "runtime", None)', 'hasattr(self._model, "plan")'])
def test_a_probe_is_found(source: str) -> None:
    assert list(probes(source)) == [1]
