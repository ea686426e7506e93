"""Packs, quantises and splits weights once: `python -m allspan.worker.tools.convert CONFIG.json --ranks N --into DIR`.

A launcher runs it as a process and owns DIR, which is there and empty. Prints one JSON object on standard output: what
was written, or {"error", "message"}.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import allspan
from allspan.kernels.packed_spec import LAYOUT
from allspan.kernels.packer import Packer
from allspan.protos.api.errors import AllspanError, CheckpointError, ConfigError, InternalError
from allspan.protos.cluster.progress import Progress
from allspan.protos.config.config_json import from_json
from allspan.protos.config.converted_manifest import (
    FORMAT,
    MANIFEST,
    METADATA_GGUF,
    Manifest,
    RankWeights,
    SourceFile,
    is_converted,
    sha256_of,
    source_files,
)
from allspan.protos.config.settings import WorkerConfig
from allspan.protos.text.tokenizers.gguf_metadata import metadata_part
from allspan.worker.load.converted import declared
from allspan.worker.load.loader import Prepared, note_decoded, open_checkpoint, open_ops, prepare
from allspan.worker.models.spec_json import spec_json
from allspan.worker.process import host
from allspan.worker.weights.rank_file import new_rank_file

_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Suffixes of the files that are copied: configs, tokenizers, chat templates."""
_MARGIN_BYTES = 1 << 20


def convert(config: WorkerConfig, ranks: int, into: Path) -> Manifest:
    """Fills the empty folder `into`. Raises what loading would, and OSError for what the disk does not take."""
    model = Path(config.model.path)
    if is_converted(model):
        raise ConfigError(f"{model} is converted already: convert what it was made from")
    model_config = replace(config.model, device="cpu")  # converted weights lie in panels
    prepared = [prepare(model_config, config.cache, rank, ranks) for rank in range(ranks)]
    note_decoded(config.model.path, prepared[0].holding)
    source = prepared[0].source
    copied = _to_copy(source.path)
    _check_room(into, sum(rank.weight_bytes for rank in prepared) + sum(path.stat().st_size for path in copied))
    checkpoint = open_checkpoint(source, config.model.load_format)
    dummy = config.model.load_format == "dummy"
    files = [] if dummy else sorted({checkpoint.where(name) for name in checkpoint.names()})
    packer = Packer(open_ops(config).runtime)
    with ThreadPoolExecutor(1) as hashing:
        hashed = hashing.submit(source_files, files)
        for path in copied:
            target = into / path.relative_to(source.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        if source.path.is_file():
            (into / METADATA_GGUF).write_bytes(metadata_part(source.path))
        written = tuple(_convert_rank(config, each, packer, into) for each in prepared)
        described: tuple[SourceFile, ...] = hashed.result()
    _check_unchanged(described)
    manifest = Manifest(
        FORMAT, LAYOUT, allspan.__version__, prepared[0].held, spec_json(source.spec), source.stored, described, written
    )
    (into / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _check_unchanged(source: Sequence[SourceFile]) -> None:
    """Raises CheckpointError for a file that was written to while it was read."""
    for known in source:
        found = Path(known.path).stat()
        if (found.st_size, found.st_mtime_ns) != (known.num_bytes, known.mtime_ns):
            raise CheckpointError(f"{known.path}: changed while it was converted: convert it again once it is whole")


def _convert_rank(config: WorkerConfig, prepared: Prepared, packer: Packer, into: Path) -> RankWeights:
    holding = replace(prepared.holding, packer=packer)
    shard, ranks = holding.shard, holding.shard.size
    checkpoint = open_checkpoint(prepared.source, config.model.load_format)
    path = into / f"rank-{shard.rank}.safetensors"
    metadata = {"writer": f"allspan {allspan.__version__}", "rank": str(shard.rank), "ranks": str(ranks)}
    title = f"converting {config.model.name}" + (f", rank {shard.rank} of {ranks}" if ranks > 1 else "")
    with Progress(title) as progress, new_rank_file(path, declared(holding), metadata) as file:

        def on_progress(done: int, total: int) -> None:
            file.release()
            progress(done, total)

        holding.read(checkpoint, "cpu", on_progress, file.tensors)
    return RankWeights(path.name, file.num_bytes, file.header_sha256, sha256_of(path))


def _check_room(into: Path, num_bytes: int) -> None:
    needed, free = num_bytes + _MARGIN_BYTES, shutil.disk_usage(into).free
    if free < needed:
        raise ConfigError(
            f"the converted model takes {needed} bytes, {into.parent} has {free} free: free some, or convert to "
            "another disk"
        )


def _to_copy(source: Path) -> list[Path]:
    """What serving needs of a folder beside the weights: configs, also of sentence-transformers' modules, and the
    tokenizer."""
    if source.is_file():
        return []
    found = (path for path in sorted(source.iterdir()) if path.suffix in _COPIED and path.is_file())
    return [path for path in found if not path.name.endswith(".index.json")] + sorted(
        source.glob("[0-9]_*/config.json")
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m allspan.worker.tools.convert", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.json", help="Names the configuration that the ranks would get.")
    parser.add_argument("--ranks", type=int, required=True, help="Sets the number of ranks.")
    parser.add_argument("--into", type=Path, required=True, help="Names an empty folder.")
    arguments = parser.parse_args(argv)
    said: dict[str, Any]
    try:
        config = from_json(Path(arguments.config).read_text(encoding="utf-8"))
        host.run_on(config.parallel.cpus)
        manifest = convert(config, arguments.ranks, arguments.into)
        said = {"held": dict(manifest.held), "ranks": [asdict(rank) for rank in manifest.ranks]}
    except AllspanError as error:
        said = {"error": error.code, "message": error.message}
    except OSError as error:
        named = error.filename2 or error.filename  # of two, the one that is written
        where = f"{named}: " if named else ""
        said = {"error": CheckpointError.code, "message": f"{where}{error.strerror or error}"}
    except RuntimeError as error:  # torch's and the kernels' own
        said = {"error": InternalError.code, "message": str(error)}
    print(json.dumps(said))
    return 1 if "error" in said else 0


if __name__ == "__main__":
    host.die_with_parent()
    sys.exit(main())
