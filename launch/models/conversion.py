"""Making a folder of converted weights: all of it, or nothing. The worker's process fills it; it needs torch."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from allspan.launch.models.file_changes import FileChanges
from allspan.launch.models.find_model import FoundModel
from allspan.launch.models.local_models import find_local
from allspan.launch.placement.topology import read_topology
from allspan.launch.settings import ServeSettings
from allspan.protos.api.errors import CheckpointError, ConfigError, InternalError, from_code
from allspan.protos.config.converted_manifest import check_ranks, is_converted, read_manifest
from allspan.protos.config.settings import ModelConfig, ParallelConfig, ServiceConfig, WorkerConfig
from allspan.protos.model_files.regular_file import is_there


@dataclass(frozen=True)
class ConvertSettings:
    """The flags of `allspan convert` beside those of the weights."""

    out: str
    ranks: int = 1
    """Splits the weights for this many ranks, each with a file of its own."""
    threads: int = 0
    """Converts with this many threads; 0 takes the physical cores of this machine."""
    overwrite: bool = False
    """Replaces OUT if an earlier conversion made it."""


def with_its_ranks(settings: ServeSettings) -> ServeSettings:
    """A converted model decides how many ranks there are. ConfigError when another number is asked for."""
    folder = Path(os.path.expanduser(settings.model))
    if not is_there(folder) and (local := find_local(settings.model)):
        folder = local.path
    if not is_converted(folder):
        return settings
    manifest = read_manifest(folder)
    if settings.placement.ranks:
        check_ranks(folder, manifest, settings.placement.ranks)
    return replace(settings, placement=replace(settings.placement, ranks=len(manifest.ranks)))


def convert(model: FoundModel, weights: ModelConfig, settings: ConvertSettings) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and of each rank's file its name, length and hashes. Raises AllspanError; then OUT is as it was."""
    out = Path(os.path.expanduser(settings.out)).resolve()  # a link stays one, to the new folder
    _check(out, model.path, settings.overwrite)
    with _beside(out) as folder:
        config = WorkerConfig(
            model=replace(weights, path=str(model.path), name=model.name),
            service=ServiceConfig(run_dir=str(folder)),
            parallel=ParallelConfig(threads=settings.threads or read_topology().num_cores),
        )
        ranks = _run(config, settings.ranks, folder)
        _sync(folder)
        _put_in_place(folder, out)
    return out, ranks


def _check(out: Path, model: Path, overwrite: bool) -> None:
    if out == model or out in model.parents:
        raise ConfigError(f"OUT is {out}, which holds the model itself: give another folder")
    if not out.parent.is_dir():
        raise ConfigError(f"OUT is {out}, but there is no folder {out.parent}: make it first")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise ConfigError(f"OUT is {out}, which exists: give another name, or --overwrite")
    if not is_converted(out):
        raise ConfigError(f"OUT is {out}, which `allspan convert` has not made: remove it yourself, or give another")


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder on the same disk, gone afterwards unless it was moved; so are those of conversions that were killed."""
    prefix = f".{out.name}.converting-"
    for stale in out.parent.glob(f"{glob.escape(prefix)}*"):
        owner = stale.name.removeprefix(prefix)
        if not (owner.isdigit() and Path("/proc", owner).exists()):
            shutil.rmtree(stale)
    folder = out.parent / f"{prefix}{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(config: WorkerConfig, ranks: int, into: Path) -> list[dict[str, Any]]:
    source = FileChanges(Path(config.model.path))
    with tempfile.TemporaryDirectory(prefix="allspan-convert-") as scratch:
        path = Path(scratch) / "config.json"
        path.write_text(json.dumps(asdict(config)), encoding="utf-8")
        words = [
            sys.executable,
            "-m",
            "allspan.worker.tools.convert",
            str(path),
            "--ranks",
            str(ranks),
            "--into",
            str(into),
        ]
        # Its progress goes to this terminal; it ends with this process, and before the folder is removed.
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                told, _ = process.communicate()
            except BaseException:
                process.kill()
                raise
    try:
        said = json.loads(told.splitlines()[-1])
    except (IndexError, ValueError):
        if changed := source.first():
            raise CheckpointError(f"the conversion ended with code {process.returncode}: {changed}") from None
        raise InternalError(f"the conversion ended with code {process.returncode} and said nothing") from None
    if "error" in said:
        raise from_code(said["error"], said["message"])
    written: list[dict[str, Any]] = said["ranks"]
    return written


def _sync(folder: Path) -> None:
    """Flushes a folder and its files to the disk, before it is renamed to the name that marks it complete."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _put_in_place(folder: Path, out: Path) -> None:
    if not out.exists():
        folder.rename(out)
        return
    old = folder.with_name(f"{folder.name}-old")
    out.rename(old)
    folder.rename(out)
    shutil.rmtree(old)
