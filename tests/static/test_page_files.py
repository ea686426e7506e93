"""The page's files: sizes of what is written by hand, and libraries that are what their packages hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "client" / "gateway" / "page"
LIBRARIES = PAGE / "lib"
MAX_FILE_LINES = 400
MAX_FILES = 15


def test_scripts_and_styles_are_short_and_folders_small() -> None:
    files = [file for file in PAGE.rglob("*") if file.is_file() and not file.is_relative_to(LIBRARIES)]
    long = [file.name for file in files if len(file.read_text().splitlines()) > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"
    full = [folder for folder in {file.parent for file in files} if sum(f.parent == folder for f in files) > MAX_FILES]
    assert not full, f"over {MAX_FILES} files: {full}"


def test_libraries_are_unaltered_and_name_version_and_licence() -> None:
    packages = json.loads((LIBRARIES / "versions.json").read_text())
    listed = {name: digest for package in packages.values() for name, digest in package["files"].items()}
    own = {"README.md", "LICENSES.txt", "versions.json"}
    found = {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in LIBRARIES.rglob("*")
        if file.is_file() and (name := file.relative_to(LIBRARIES).as_posix()) not in own
    }
    assert found == listed
    licences = (LIBRARIES / "LICENSES.txt").read_text()
    assert [
        name for name, told in packages.items() if f"{name} {told['version']} ({told['licence']})" not in licences
    ] == []
