"""Weights that `allspan convert` has packed, quantised and split before: checked, then mapped as they lie."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from allspan.kernels.packed_spec import LAYOUT
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.converted_manifest import Manifest, check_ranks, check_source, read_manifest, sha256_of
from allspan.protos.config.settings import HELD_FIELDS, ModelConfig
from allspan.worker.models.holding import Holding, Progress
from allspan.worker.models.spec import ModelSpec
from allspan.worker.models.spec_json import SpecMismatch, spec_of
from allspan.worker.process.release_memory import num_memory_nodes
from allspan.worker.step.backend import HOST
from allspan.worker.weights.held_tensor import HeldTensor
from allspan.worker.weights.rank_file import RankFile

logger = logging.getLogger(__name__)


class ConvertedModel:
    """A folder's manifest. Raises CheckpointError when another version wrote it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        if self.manifest.layout != LAYOUT:
            raise CheckpointError(
                f"{folder}: its weights are packed in layout {self.manifest.layout} (allspan {self.manifest.version}), "
                f"this version reads layout {LAYOUT}: convert the model again"
            )
        self.spec = _spec(folder, self.manifest)

    def held(self, config: ModelConfig) -> dict[str, Any]:
        """The settings that decide how weights are held, as they are here. ConfigError for another one asked for."""
        for name in HELD_FIELDS:
            asked, default = getattr(config, name), _default(name)
            has = self.manifest.held.get(name, default)
            if asked not in (default, has):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{self.folder} holds weights with {name} {has}, {flag} is {asked}: leave it out, or convert the "
                    f"model again with {flag} {asked}"
                )
        return dict(self.manifest.held)


class ConvertedWeights:
    """One rank's, opened and checked: length and header, or (`verify`) every byte."""

    def __init__(self, model: ConvertedModel, holding: Holding, verify: bool) -> None:
        """Raises ConfigError for another number of ranks, CheckpointError for files that are stale or altered."""
        folder, manifest, shard = model.folder, model.manifest, holding.shard
        check_ranks(folder, manifest, shard.size)
        if shard.rank == 0:
            check_source(folder, manifest)
        entry = manifest.ranks[shard.rank]
        self._file = RankFile(folder / entry.name, entry.num_bytes, entry.header_sha256)
        if verify and sha256_of(folder / entry.name) != entry.sha256:
            raise CheckpointError(f"{folder / entry.name}: altered: its content is not what was written: convert again")
        self._mapped = self._file.tensors(declared(holding))

    def read(
        self, device: str, on_progress: Progress | None, into: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The tensors, on `device`, or copied `into` those of an earlier reading.

        On a machine with one memory they are the mapped file itself, shared with other processes that map it. With
        several, the file lies in the memory of the node that read it first: so they are copied into this rank's own.
        """
        nodes = num_memory_nodes()
        if into is None and device == HOST and nodes <= 1:
            self._file.populate(on_progress)
            logger.info("weights: %s is mapped", self._file.path)
            return self._mapped
        logger.info("weights: %s is copied%s", self._file.path, f" ({nodes} memory nodes)" if nodes > 1 else "")
        held, done, total = {}, 0, sum(tensor.nbytes for tensor in self._mapped.values())
        for name, tensor in self._mapped.items():
            held[name] = tensor.to(device, copy=True) if into is None else into[name].copy_(tensor)
            self._file.release()
            done += tensor.nbytes
            if on_progress is not None:
                on_progress(done, total)
        return held


def declared(holding: Holding) -> dict[str, HeldTensor]:
    """Everything that a rank holds, by canonical name."""
    return {name: tensor for piece in holding.pieces for name, tensor in holding.tensors(piece).items()}


def _spec(folder: Path, manifest: Manifest) -> ModelSpec:
    try:
        return spec_of(manifest.spec)
    except SpecMismatch as error:
        raise CheckpointError(
            f"{folder}: allspan {manifest.version} described the model otherwise than this version does "
            f"({', '.join(error.names)}): convert the model again"
        ) from error


def _default(name: str) -> Any:
    return next(field.default for field in fields(ModelConfig) if field.name == name)
