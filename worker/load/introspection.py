"""What there is to know of a loaded model and its rank that changes seldom, as JSON values."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import allspan
from allspan.protos.api.errors import CheckpointError, InvalidRequest
from allspan.protos.config.settings import ModelConfig
from allspan.protos.model_files.json_values import read_json_object
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import expected_shapes
from allspan.worker.models.model import Model
from allspan.worker.models.pieces import EP
from allspan.worker.models.shard import Place, make_shard
from allspan.worker.models.spec_json import spec_json

_LIBRARIES = ("torch", "numpy", "grpcio", "mpi4py")
_WEIGHT_FORMATS = {".safetensors": "safetensors", ".gguf": "gguf", ".bin": "torch"}


class Inspection:
    """Answers for one rank; every answer is a JSON object, and may be asked for from any thread."""

    def __init__(
        self, config: ModelConfig, model: Model, kernels: str, masks: Callable[[], dict[str, Any]] = dict
    ) -> None:
        """`masks`: what there is to say about the masks of grammars; the one thing here that changes all the time."""
        self._config = config
        self._model = model
        self._kernels = kernels
        self._answers: dict[str, Callable[[], dict[str, Any]]] = {
            "model": self.model,
            "files": self.files,
            "profile": self.profile,
            "masks": masks,
            "version": self.version,
        }

    def answer(self, what: str) -> dict[str, Any]:
        """Raises InvalidRequest for something that is not known."""
        if what not in self._answers:
            raise InvalidRequest(f"what is {what!r}, must be one of {', '.join(self._answers)}", "what")
        return self._answers[what]()

    def model(self) -> dict[str, Any]:
        """The whole model's shape, and each rank's part: its heads and its tensors."""
        holding = self._model.holding
        spec, size, stages = holding.spec, holding.shard.size, holding.shard.stage.size
        groups = holding.shard.groups[EP].size
        places = [(rank, Place(stage, stages)) for stage in range(stages) for rank in range(size)]
        shards = [make_shard(rank, size, stage, groups, holding.shard.attends_apart) for rank, stage in places]
        parts = [replace(holding, shard=shard) for shard in shards]
        return {
            "name": self._config.name,
            "path": self._config.path,
            "dtype": _dtype(holding.dtype),
            "quantization": holding.quantization,
            "max_model_len": self._model.max_model_len,
            "parameters": _parameters(holding),
            "spec": spec_json(spec),
            "cache": [asdict(group) for group in self._model.cache_groups],
            "ranks": [_part(part) for part in parts],
        }

    def files(self) -> dict[str, Any]:
        """Raises CheckpointError when they cannot be looked at any more."""
        path = Path(self._config.path)
        try:
            paths = sorted(path.iterdir()) if path.is_dir() else [path]
            files = [
                {"name": file.name, "bytes": file.stat().st_size, "format": file.suffix.removeprefix(".")}
                for file in paths
                if file.suffix in (*_WEIGHT_FORMATS, ".json") and file.is_file()
            ]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        suffixes = {file.suffix for file in paths}
        found = "dummy" if self._config.load_format == "dummy" else None
        return {
            "path": str(path),
            "format": found or next((name for suffix, name in _WEIGHT_FORMATS.items() if suffix in suffixes), ""),
            "dtype": self._model.spec.dtype,
            "made_by": _made_by(path),
            "read_by": f"allspan {allspan.__version__}",
            "files": files,
        }

    def profile(self) -> dict[str, Any]:
        """{"ops": [...]}: the fields of each OpProfile, on this rank."""
        return {"ops": [asdict(op) for op in self._model.profile()]}

    def version(self) -> dict[str, Any]:
        libraries = ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)
        line = (
            f"allspan {allspan.__version__} (kernels {self._kernels}; {libraries}; Python {platform.python_version()})"
        )
        return {"version": line}


def _part(holding: Holding) -> dict[str, Any]:
    shard, block = holding.shard, holding.spec.layers[0].attention
    heads, kv_heads = shard.units(block.heads), shard.units(block.kv_heads)
    layers = shard.layers(len(holding.spec.layers))
    return {
        "rank": shard.stage.rank * shard.size + shard.rank,
        "layers": [layers.start, layers.stop],
        "query_heads": [heads.start, heads.stop],
        "kv_heads": [kv_heads.start, kv_heads.stop],
        "weight_bytes": holding.num_bytes,
        "tensors": [
            {"name": name, "shape": list(tensor.shape), "dtype": _dtype(tensor.dtype), "bytes": tensor.num_bytes}
            for piece in holding.pieces
            for name, tensor in holding.tensors(piece).items()
        ],
    }


def _parameters(holding: Holding) -> int:
    """Weights of the model, each counted once."""
    return sum(map(math.prod, expected_shapes(holding.spec, holding.weights, "hugging_face").values()))


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _made_by(path: Path) -> str:
    """What wrote the checkpoint, as its config.json says; "" when nothing does."""
    config = path / "config.json"
    version = read_json_object(config).get("transformers_version") if config.is_file() else None
    return f"transformers {version}" if version else ""


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "none"
