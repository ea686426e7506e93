"""Which families there are, and how a path on disk becomes a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.converted import MANIFEST, is_converted
from allspan.protos.errors import CheckpointError, ModelNotFound
from allspan.protos.json_file import read_json_object
from allspan.worker.models.converted import ConvertedModel
from allspan.worker.models.families.common import Family
from allspan.worker.models.families.llama import LLAMA, MISTRAL
from allspan.worker.models.families.qwen2 import QWEN2
from allspan.worker.models.families.qwen3 import QWEN3
from allspan.worker.models.foreign import ForeignConfig
from allspan.worker.models.gguf_config import gguf_values
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.gguf_file import GgufFile

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""model_type → family. A new family is one file and one name here."""


@dataclass(frozen=True)
class ModelSource:
    """A model as found on disk: `path` is the folder or the GGUF file; `gguf` is set for the latter, `converted` for a
    folder that `allspan convert` has made."""

    path: Path
    family: Family
    spec: ModelSpec
    gguf: GgufFile | None
    converted: ConvertedModel | None = None

    @property
    def stored(self) -> Mapping[str, str]:
        """The types of a GGUF file's tensors, by its names; empty for other checkpoints."""
        if self.converted is not None:
            return self.converted.manifest.stored
        return self.gguf.kinds() if self.gguf is not None else {}


def inspect_model(path: str) -> ModelSpec:
    """What a model is, from its config or GGUF header alone. Raises ModelNotFound or CheckpointError."""
    return find_model(path).spec


def find_model(path: str) -> ModelSource:
    """A folder with config.json, a GGUF file, a folder with one, or a .json config alone (for random weights)."""
    place = Path(path).expanduser()
    if not place.exists():
        raise ModelNotFound(f"{place}: no such file or folder")
    if is_converted(place):
        return _from_converted(place)
    config = place / "config.json" if place.is_dir() else place
    if config.suffix == ".json" and config.is_file():
        return _from_config(config)
    return _from_gguf(_only_gguf(place) if place.is_dir() else place)


def _from_config(source: Path) -> ModelSource:
    folder = source.parent
    values = read_json_object(source)
    if not any(values.get(key) for key in ("quantization_config", "compression_config")):
        for name in ("quantize_config.json", "quant_config.json"):
            if (folder / name).is_file():
                raise _quantised(folder / name, read_json_object(folder / name))
    else:
        raise _quantised(source, values.get("quantization_config") or values["compression_config"])
    family = _family(values.get("model_type"), str(source))
    config = ForeignConfig(values, str(source))
    architectures = values.get("architectures")
    if architectures and family.architecture.lower() not in [str(name).lower() for name in architectures]:
        raise config.error(
            f"architecture {architectures[0]!r} of model type {family.model_type!r} is not supported "
            f"(supported: {family.architecture})"
        )
    return ModelSource(folder, family, family.read(config), None)


def _from_converted(folder: Path) -> ModelSource:
    model = ConvertedModel(folder)
    return ModelSource(folder, _family(model.spec.family, str(folder / MANIFEST)), model.spec, None, model)


def _from_gguf(path: Path) -> ModelSource:
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    known = {name: family for family in FAMILIES.values() for name in family.gguf_architectures}
    if architecture not in known:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported (supported: {', '.join(known)})"
        )
    family = known[architecture]
    config = ForeignConfig(gguf_values(file, family.model_type, str(path)), str(path))
    return ModelSource(path, family, family.read(config), file)


def _family(model_type: object, source: str) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise CheckpointError(f"{source}: model_type {model_type!r} is not supported (supported: {supported})")
    return FAMILIES[model_type]


def _quantised(source: Path, values: Any) -> CheckpointError:
    method = values.get("quant_method") or values.get("quant_type") if isinstance(values, dict) else None
    return CheckpointError(
        f"{source}: quantised checkpoint ({method or 'unnamed method'}) is not supported "
        "(supported: safetensors in float32, bfloat16 or float16, and GGUF)"
    )


def _only_gguf(folder: Path) -> Path:
    files = sorted(path for path in folder.glob("*.gguf") if "-of-" not in path.name or "-00001-of-" in path.name)
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{folder}: {len(files)} GGUF files: name one, such as {files[0]}")
    raise CheckpointError(f"{folder}: no config.json and no *.gguf file in this folder")
