"""The tokenizer.json of a model folder that has other tokenizer files: made once, and kept among this user's files.

Ours are the conversions of ranked vocabularies (`ranks`); all others are transformers'. The folder itself is never
written to: it may be read-only, or another user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from allspan import __version__
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.cluster.cluster_file import write_atomically
from allspan.protos.config.home import home
from allspan.protos.model_files.limits import MAX_TOKENIZER_BYTES
from allspan.protos.model_files.regular_file import is_there, names_in, read_regular

logger = logging.getLogger("allspan.text")

_READ = (".json", ".txt", ".model", ".tiktoken")
"""How the names of files end that a conversion may read."""
_NOT_READ = (".safetensors.index.json", ".bin.index.json")


def kept(folder: Path, make: Callable[[], bytes]) -> tuple[bytes, str]:
    """The tokenizer.json that `make` gives for the folder, from an earlier call where its files have not changed; and
    where it comes from, for messages."""
    try:
        file = home() / "tokenizers" / f"{_digest(folder)}.json"
    except ConfigError:  # a user without a home folder
        return make(), str(folder)
    if is_there(file):
        try:
            return read_regular(file, MAX_TOKENIZER_BYTES), f"{folder}: the tokenizer kept of it (remove {file})"
        except CheckpointError as error:
            logger.warning("the tokenizer kept of %s is made anew: %s", folder, error)
    data = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data.decode())
    except OSError as error:
        logger.warning("the tokenizer made of %s cannot be kept for the next start: %s", folder, error)
    return data, str(folder)


def _digest(folder: Path) -> str:
    """Names this version and the content of every file that the tokenizer could depend on."""
    digest = hashlib.sha256(__version__.encode())
    for name in names_in(folder):
        if not name.endswith(_READ) or name.endswith(_NOT_READ):
            continue
        with contextlib.suppress(CheckpointError):  # a pipe, or larger than a tokenizer's file can be
            content = hashlib.sha256(read_regular(folder / name, MAX_TOKENIZER_BYTES))
            digest.update(name.encode("utf-8", "replace") + b"\0" + content.digest())
    return digest.hexdigest()
