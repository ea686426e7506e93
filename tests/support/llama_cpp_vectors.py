"""llama.cpp's own tokenizer vectors, out of llama-cpp-python's source package, as the configured package index has it.

Fetched once into the cache of the tests; nothing of it is in this repository.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import IO

from support import artefacts

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SEPARATOR = "\n__ggml_vocab_test__\n"
_MEMBER = re.compile(r".*/models/(ggml-vocab-[\w.-]+\.gguf(\.inp|\.out)?)")
_INDEX_TIMEOUT_S, _READ_TIMEOUT_S = 60, 60


class NotToBeHad(Exception):
    """Why the package cannot be fetched here."""


class _Hashing:
    """A stream that hashes what is read through it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.hash = stream, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.hash.update(data)
        return data


def folder(wanted: set[str]) -> Path:
    """Holds ggml-vocab-NAME.gguf with its .inp and .out for every wanted NAME. Raises NotToBeHad."""

    def fetch(target: Path) -> None:
        target.mkdir()
        _fetch(_address(), target, wanted)

    return artefacts.entry(PACKAGE, f"{VERSION}-{artefacts.key(sorted(wanted))}", fetch)


def vectors(vocabulary: Path) -> list[tuple[str, list[int]]]:
    """(text, token ids) of one vocabulary; the last expectation may be that of a text without a line end."""
    texts = Path(f"{vocabulary}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{vocabulary}.out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines[: len(texts)], strict=True)]


def _address() -> str:
    """Where the package's source lies: pip names it when it is told to take no source."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-vvv",
        "--no-deps",
        "--only-binary=:all:",
        f"{PACKAGE}=={VERSION}",
    ]
    try:
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=_INDEX_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotToBeHad(f"the package index did not answer within {_INDEX_TIMEOUT_S} s") from error
    found = re.search(rf"\S+/{PACKAGE.replace('-', '_')}-{re.escape(VERSION)}\.tar\.gz", done.stdout + done.stderr)
    if found is None:
        raise NotToBeHad(f"the package index has no source of {PACKAGE} {VERSION}")
    return found[0]


def _fetch(address: str, target: Path, wanted: set[str]) -> None:
    try:
        with urllib.request.urlopen(address, timeout=_READ_TIMEOUT_S) as response:
            stream = _Hashing(response)
            with tarfile.open(fileobj=stream, mode="r|gz") as archive:  # type: ignore[call-overload]
                for member in archive:
                    match = _MEMBER.fullmatch(member.name)
                    if match and any(match[1].startswith(f"ggml-vocab-{name}.gguf") for name in wanted):
                        source = archive.extractfile(member)
                        assert source is not None
                        (target / match[1]).write_bytes(source.read())
            while stream.read(2**20):
                pass
    except (OSError, tarfile.TarError) as error:
        raise NotToBeHad(f"{address} cannot be fetched: {error}") from error
    if stream.hash.hexdigest() != SHA256:
        raise AssertionError(f"{address} has SHA-256 {stream.hash.hexdigest()}, expected {SHA256}")
