"""Builds the gRPC examples as docs/grpc.md says, in folders of the test's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "grpc"
GOCODE = "/usr/share/gocode"
_BUILD_S = 300


def python_example(folder: Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / "python" / "client.py")]


def node_example(node_folder: Path) -> list[str]:
    """Beside the packages that are installed for the tests, which are those of its package.json."""
    shutil.copy(EXAMPLES / "details.proto", node_folder)
    shutil.copy(EXAMPLES / "node" / "client.mjs", node_folder / "example.mjs")
    return ["node", str(node_folder / "example.mjs")]


def go_example(folder: Path) -> list[str]:
    """With Debian's packages of gRPC, which lie in GOCODE."""
    _need("go (Go)", "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    if not Path(GOCODE, "src", "google.golang.org", "grpc").is_dir():
        pytest.skip("gRPC for Go (golang-google-grpc-dev) is not installed")
    source = folder / "src"
    (source / "example").mkdir(parents=True)
    place = "Minference.proto=example/inferencepb"
    options = [f"--go_out={source}", f"--go_opt={place}", f"--go-grpc_out={source}", f"--go-grpc_opt={place}"]
    _run(["protoc", f"-I{ROOT / 'protos'}", *options, "inference.proto"], folder)
    shutil.copy(EXAMPLES / "go" / "client.go", source / "example")
    paths = {"GOPATH": f"{folder}:{GOCODE}", "GOCACHE": str(folder / "cache"), "GO111MODULE": "off", "GOFLAGS": ""}
    _run(["go", "build", "-o", str(folder / "client"), "example"], folder, paths)
    return [str(folder / "client")]


def cpp_example(folder: Path) -> list[str]:
    _need("gRPC for C++", "g++", "protoc", "grpc_cpp_plugin", "pkg-config")
    found = subprocess.run(["pkg-config", "--libs", "grpc++", "protobuf"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("gRPC for C++ (libgrpc++-dev) is not installed")
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
    protos = [f"-I{ROOT / 'protos'}", f"-I{EXAMPLES}"]
    _run(["protoc", *protos, "--cpp_out=.", "--grpc_out=.", plugin, "inference.proto", "details.proto"], folder)
    sources = [*map(str, folder.glob("*.cc")), str(EXAMPLES / "cpp" / "client.cpp")]
    _run(["g++", "-O0", "-std=c++17", "-I.", *sources, "-o", "client", *found.stdout.split()], folder)
    return [str(folder / "client")]


def _need(what: str, *tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool}, which {what} needs, is not installed")


def _run(command: Sequence[str], folder: Path, more: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | (more or {}),
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
