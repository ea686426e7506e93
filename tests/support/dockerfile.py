"""Dockerfiles and .dockerignore, read as Docker reads them, as far as those in deploy/docker go."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each instruction's word and the rest of it, continued lines joined and comments left out."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


def expand(text: str, values: Mapping[str, str]) -> str:
    """Returns `text` with $NAME and ${NAME} replaced, and with nothing for names that are not given."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], ""), text)


def assignments(rest: str, values: Mapping[str, str]) -> dict[str, str]:
    """What the words NAME=VALUE of ENV or ARG give."""
    pairs = (word.partition("=") for word in shlex.split(rest))
    return {name: expand(value, values) for name, _, value in pairs}


def words(rest: str) -> list[str]:
    """The exec form of CMD, ENTRYPOINT or HEALTHCHECK CMD; the shell form becomes sh -c."""
    _, command, exec_form = rest.rpartition("CMD ")
    text = exec_form if command else rest
    return json.loads(text) if text.startswith("[") else ["/bin/sh", "-c", text]


def ignored(context: Path, path: str) -> bool:
    """Whether .dockerignore leaves a path out: the last line that fits decides."""
    result = False
    for line in (context / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#"):
            deep = pattern.removeprefix("**/")
            fits = fnmatch.fnmatch(path, pattern) or path.startswith(f"{pattern}/")
            if fits or (deep != pattern and fnmatch.fnmatch(Path(path).name, deep)):
                result = not line.startswith("!")
    return result


def sent(context: Path, source: str) -> Iterator[str]:
    """The files below `source` that reach the builder, relative to the context."""
    start = context / source
    if start.is_file():
        if not ignored(context, os.path.normpath(source)):
            yield os.path.normpath(source)
        return
    kept = {line[1:].split("/")[0] for line in (context / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for folder, folders, names in os.walk(start):
        below = os.path.relpath(folder, context)
        if below == ".":
            folders[:] = [name for name in folders if name in kept]
        elif ignored(context, f"{below}/x"):
            folders.clear()
        paths = (os.path.normpath(f"{below}/{name}") for name in names)
        yield from (path for path in paths if not ignored(context, path))
