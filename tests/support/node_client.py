"""Node.js with the packages of tests/client/gateway/node, kept by `support.artefacts` (the fixture `node_folder`)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support import artefacts

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "client" / "gateway" / "node"
_OFFLINE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH|ECONNRESET")


def install(folder: Path) -> Path:
    """Every script of SOURCE with its packages; skips where Node.js, npm or the package index is not there."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} (Node.js) is not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    lists = [SOURCE / "package.json", SOURCE / "package-lock.json"]
    packages = artefacts.entry("node", artefacts.key(version, *lists), _install_packages)
    (folder / "node_modules").symlink_to(packages / "node_modules")
    for file in (*SOURCE.glob("*.json"), *SOURCE.glob("*.mjs"), ROOT / "protos" / "inference.proto"):
        shutil.copy(file, folder)
    return folder


def _install_packages(folder: Path) -> None:
    folder.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCE / name, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode and _OFFLINE.search(done.stderr):
        pytest.skip("npm (Node.js) cannot reach its package index")
    assert done.returncode == 0, done.stderr


def node_client(folder: Path) -> list[str]:
    """The command that takes ADDRESS PROMPT MAX_TOKENS, from an installed folder."""
    return ["node", str(folder / "client.mjs")]
