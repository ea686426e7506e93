"""The manifest that `allspan convert` writes into a folder, beside the weights of each rank.

allspan.json              this manifest
rank-K.safetensors        the tensors that rank K holds, packed and quantised, under their canonical names
config.json, tokenizer.json, generation_config.json …   of the source; of a GGUF file, its metadata (metadata.gguf)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.config.settings import HELD_FIELDS
from allspan.protos.model_files.json_values import read_json_object, shown
from allspan.protos.model_files.regular_file import is_there

MANIFEST = "allspan.json"
METADATA_GGUF = "metadata.gguf"
FORMAT = 1
"""Version of the manifest's own format."""
MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that weights were read from, as it was then."""

    path: str
    num_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The file of one rank; `header_sha256` is of all bytes before the tensors."""

    name: str
    num_bytes: int
    header_sha256: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`layout` is the version of packed weights (`allspan.kernels.packed_spec.LAYOUT`), `held` the settings that decide
    how weights are held, `spec` the model as its family read it."""

    format: int
    layout: int
    version: str
    """Version of the project that wrote it."""
    held: Mapping[str, Any]
    spec: Mapping[str, Any]
    stored: Mapping[str, str]
    """The types of a quantised source's tensors, by its own names; empty for other sources."""
    source: tuple[SourceFile, ...]
    ranks: tuple[RankWeights, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def is_converted(model: Path) -> bool:
    """Whether a model's path is a folder with a manifest. Raises CheckpointError for a folder that may not be
    searched."""
    return is_there(model / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError naming the file and what is wrong with it."""
    path = folder / MANIFEST
    values = read_json_object(path)
    if values.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format is {values.get('format')!r}, this version reads {FORMAT}: convert the model again"
        )
    try:
        source = tuple(SourceFile(**entry) for entry in values.pop("source"))
        ranks = tuple(RankWeights(**entry) for entry in values.pop("ranks"))
        for index, rank in enumerate(ranks):
            if rank.name != f"rank-{index}.safetensors":
                raise ValueError(f"ranks[{index}].name is {shown(rank.name)}, must be rank-{index}.safetensors")
        manifest = Manifest(source=source, ranks=ranks, **values)
        for entry in (manifest, *source, *ranks):
            _check_types(entry)
        if not ranks or len(ranks) > MAX_RANKS:
            raise ValueError(f"it has {len(ranks)} ranks, must be from 1 to {MAX_RANKS}")
        if unknown := sorted(set(manifest.held) - set(HELD_FIELDS)):
            raise ValueError(f"held has {unknown[0]!r}, which is none of {', '.join(HELD_FIELDS)}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a manifest of converted weights: {error}") from error
    return manifest


def _check_types(entry: Any) -> None:
    """Raises ValueError for a field of another type than it has, or a negative number."""
    kinds = {"str": str, "int": int, "Mapping[str, Any]": dict, "Mapping[str, str]": dict}
    for field in fields(entry):
        kind, value = kinds.get(str(field.type)), getattr(entry, field.name)
        if (kind is not None and type(value) is not kind) or (kind is int and value < 0):
            raise ValueError(f"{field.name} is {shown(value)}, must be of type {kind.__name__}")
    if isinstance(entry, Manifest):
        for name, value in {**entry.held, **entry.stored}.items():
            if not isinstance(value, str | int):
                raise ValueError(f"{shown(name)} is {shown(value)}, must be a text or a number")


def check_ranks(folder: Path, manifest: Manifest, ranks: int) -> None:
    """Checks the number of ranks; ConfigError when a world of so many cannot use the files."""
    count = len(manifest.ranks)
    if ranks != count:
        raise ConfigError(
            f"{folder} holds weights for {counted(count, 'rank')}, --ranks is {ranks}: pass --ranks "
            f"{count}, or convert the model again with --ranks {ranks}"
        )


def source_files(paths: list[Path]) -> tuple[SourceFile, ...]:
    """Reads every byte of the files, several at a time."""

    def describe(path: Path) -> SourceFile:
        found = path.stat()
        return SourceFile(str(path.absolute()), found.st_size, found.st_mtime_ns, sha256_of(path))

    with ThreadPoolExecutor(4) as pool:
        return tuple(pool.map(describe, paths))


def sha256_of(path: Path, num_bytes: int | None = None) -> str:
    """Returns the digest of the whole file, or of its first `num_bytes`."""
    with path.open("rb") as file:
        if num_bytes is not None:
            return hashlib.sha256(file.read(num_bytes)).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_source(folder: Path, manifest: Manifest) -> None:
    """CheckpointError when a file that the weights were made from is still there, but has other content by now.

    It is read only if its length or time differs.
    """
    for known in manifest.source:
        path = Path(known.path)
        try:
            found = path.stat()
        except OSError:
            continue  # moved or removed: what was converted stands for itself
        if (found.st_size, found.st_mtime_ns) == (known.num_bytes, known.mtime_ns):
            continue
        if found.st_size != known.num_bytes or sha256_of(path) != known.sha256:
            raise CheckpointError(
                f"{folder} is stale: {path}, which it was converted from, has changed since; convert it again with "
                "--overwrite, or serve the source itself"
            )
