"""The house rules that no linter knows: sizes, names that only one folder may speak, nothing unpickled."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("protos", "kernels", "worker", "client", "launch")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8
MAX_ATTRIBUTES = 15

# Library → the only places (folders or files) that may import it.
OWNERS = {
    "mpi4py": ("worker/parallel",),
    "cupy": ("kernels/cuda",),
    "grpc": (
        "worker/service",
        "client/transport",
        "client/gateway",
        "launch/hosts/agent",
        "protos/agent_pb2_grpc.py",
        "protos/worker_pb2_grpc.py",
        "protos/inference_pb2_grpc.py",
    ),
    "torch": ("kernels", "worker"),
    "fastapi": ("client/gateway",),
}
# Places that must not name a library, although their folder may.
STRANGERS = {
    "worker/scheduler": ("torch", "numpy", "grpc", "mpi4py"),
    "worker/cache/page_pool.py": ("torch", "numpy", "grpc", "mpi4py"),
}
# First words of a docstring that is a fragment instead of a sentence that says what the thing is.
FRAGMENTS = ("Of", "By", "That", "As", "So many", "Those", "Beside", "Whoever", "Who")
PLAIN_FOLDERS = ("protos", "kernels", "client", "launch", "worker")
HOSTILE_PICKLES = "tests/hostile/test_torch_files.py"
"""Makes pickles that would act, to show that none does."""
UNSAFE = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


@functools.cache
def tracked(*suffixes: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    files = [ROOT / name for name in names if name.endswith(suffixes)]
    return [file for file in files if file.is_file() and not file.is_symlink() and "_pb2" not in file.name]


def sources() -> list[Path]:
    return [file for file in tracked(".py") if file.relative_to(ROOT).parts[0] in (*FOLDERS, "public", "tests")]


def place(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(file)))


def imports(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_files_are_short() -> None:
    long = [f"{place(f)}: {n}" for f in sources() if (n := len(f.read_text().splitlines())) > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short_and_take_few_arguments() -> None:
    found = []
    for file in sources():
        for node in nodes(file):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([a for a in arguments if a not in ("self", "cls")])
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{place(file)}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}")
            if count > MAX_ARGUMENTS and "triton.jit" not in map(ast.unparse, node.decorator_list):  # kernels have none
                found.append(f"{place(file)}:{node.lineno} {node.name}: {count} arguments, at most {MAX_ARGUMENTS}")
    assert not found, "\n".join(found)


def attributes(node: ast.ClassDef) -> set[str]:
    """The names that a class's methods assign on `self`; the fields of a plain dataclass are not among them."""
    methods = [entry for entry in node.body if isinstance(entry, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {
        target.attr
        for method in methods
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def test_classes_have_few_attributes() -> None:
    found = {
        f"{place(file)} {node.name}"
        for file in sources()
        if place(file).startswith(FOLDERS)
        for node in nodes(file)
        if isinstance(node, ast.ClassDef) and len(attributes(node)) > MAX_ATTRIBUTES
    }
    assert not found, f"over {MAX_ATTRIBUTES} attributes: {sorted(found)}; split by responsibility"


def test_imports_are_absolute() -> None:
    found = [
        f"{place(file)}:{node.lineno}"
        for file in sources()
        for node in nodes(file)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not found, f"relative imports give modules a second identity: {found}"


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_a_library_is_named_only_where_it_belongs(library: str) -> None:
    found = [
        place(file)
        for file in sources()
        if not place(file).startswith((*OWNERS[library], "tests"))
        and any(name.split(".")[0] == library for name in imports(file))
    ]
    assert not found, f"{library} may be imported in {OWNERS[library]} only: {found}"


@pytest.mark.parametrize("where", sorted(STRANGERS))
def test_bookkeeping_knows_no_tensor_and_no_wire(where: str) -> None:
    files = [file for file in sources() if place(file).startswith(where)]
    assert files
    found = [
        f"{place(file)}: {name}" for file in files for name in imports(file) if name.split(".")[0] in STRANGERS[where]
    ]
    assert not found, found


def test_nothing_is_unpickled() -> None:
    found = [
        f"{place(file)}: {name}"
        for file in sources()
        for name in imports(file)
        if name.split(".")[0] in UNSAFE and place(file) != HOSTILE_PICKLES
    ]
    assert not found, found


def test_mpi_sends_buffers_never_objects() -> None:
    """Lower-case mpi4py calls pickle what they send."""
    lower = {
        "send",
        "recv",
        "bcast",
        "gather",
        "scatter",
        "allgather",
        "allreduce",
        "alltoall",
        "isend",
        "irecv",
        "sendrecv",
    }
    found = []
    for file in sources():
        if not place(file).startswith("worker/parallel"):
            continue
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr in lower and "comm" in ast.unparse(node.value).lower():
                found.append(f"{place(file)}:{node.lineno} {node.attr}")
    assert not found, found


def test_the_typing_links_point_at_the_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / ".typing" / "allspan" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_every_package_says_what_it_is_for() -> None:
    silent = [
        place(file)
        for file in sources()
        if file.name == "__init__.py" and place(file).split("/")[0] in FOLDERS and not ast.get_docstring(parsed(file))
    ]
    assert not silent, f"a package's __init__.py says what it does and must not know: {silent}"


def test_public_functions_and_classes_of_contracts_have_docstrings() -> None:
    found = []
    for file in sources():
        if not place(file).startswith(("protos/", "kernels/ops.py", "client/engine.py", "worker/engine/engine.py")):
            continue
        for node in parsed(file).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or is_error(node):
                continue
            if not ast.get_docstring(node):
                found.append(f"{place(file)}:{node.lineno} {node.name}")
    assert not found, found


def docstrings(file: Path) -> Iterator[ast.Constant]:
    """The strings that stand as statements of their own: docstrings of modules, classes, functions and attributes."""
    for node in nodes(file):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@pytest.mark.parametrize("folder", PLAIN_FOLDERS)
def test_docstrings_do_not_begin_as_fragments(folder: str) -> None:
    files = [file for file in sources() if place(file).startswith(f"{folder}/")]
    assert files
    found = [
        f"{place(file)}:{text.lineno} {text.value[:60]!r}"
        for file in files
        for text in docstrings(file)
        if re.match(rf"({'|'.join(FRAGMENTS)})\b", str(text.value).strip())
    ]
    assert not found, "say what it is in a full sentence:\n" + "\n".join(found)


def is_error(node: ast.ClassDef) -> bool:
    """An error class whose meaning stands in the tree at the top of its file."""
    return any(ast.unparse(base).endswith("Error") for base in node.bases)
