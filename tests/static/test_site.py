"""The documentation builds as a site with every page in its menu, no dead link, and an index for the search."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_with_every_page_and_a_search_index(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (extra docs)")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= found | {"index.html"}


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"- {path.name}" not in menu]
    assert not missing, f"mkdocs.yml's nav lacks {missing}"


def test_the_page_of_variables_has_every_variable_that_the_code_reads() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = ("client/", "kernels/", "launch/", "protos/", "worker/")
    files = [ROOT / name for name in listed if name.startswith(folders) and name.endswith((".py", ".sh"))]
    pattern = re.compile(r"""(?:environ(?:ment)?(?:\.get\(|\[)|"|\$\{)(ALLSPAN_[A-Z_]+)""")
    read = {name for file in files if file.is_file() for name in pattern.findall(file.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert "ALLSPAN_HOME" in read
    assert {name for name in read if f"`{name}`" not in page} == set()
