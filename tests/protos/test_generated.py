"""The committed protobuf code is what the .proto files say, made by the oldest supported generator."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).resolve().parents[2] / "protos"
NO_TOOLS = 3


def check(protos: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(protos / "generate.sh"), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == NO_TOOLS:
        pytest.skip(f"protoc: {done.stderr.strip().splitlines()[-1]}")
    return done


@pytest.mark.timeout(400)
def test_generated_code_is_up_to_date() -> None:
    done = check(PROTOS)
    assert done.returncode == 0, f"run protos/generate.sh\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(400)
def test_the_check_sees_a_changed_message(tmp_path: Path) -> None:
    copy = tmp_path / "protos"
    copy.mkdir()
    for file in [*PROTOS.glob("*_pb2*"), *PROTOS.glob("*.proto"), PROTOS / "generate.sh"]:
        shutil.copy(file, copy)
    proto = copy / "inference.proto"
    before, after = "uint32 max_tokens = 1;", "uint32 max_tokens = 99;"
    assert proto.read_text().count(before) == 1
    proto.write_text(proto.read_text().replace(before, after))
    assert check(copy).returncode == 1


def test_generated_code_runs_on_the_oldest_supported_libraries() -> None:
    versions = {
        re.search(pattern, file.read_text())
        for file in PROTOS.glob("*_pb2*.py")
        for pattern in [
            r"GRPC_GENERATED_VERSION = '1\.76\.0'" if "grpc" in file.name else r"# Protobuf Python Version: 6\.31\."
        ]
    }
    assert versions
    assert None not in versions
