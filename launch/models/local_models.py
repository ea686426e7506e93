"""The models of this machine: those in the models folder, and converted ones wherever they were put."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from allspan.launch.models.model_lock import lock_path, locked_at_once
from allspan.protos.api.errors import AllspanError, ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.config.converted_manifest import is_converted, read_manifest
from allspan.protos.config.home import home, models_dir
from allspan.protos.model_files.json_values import read_json_object
from allspan.protos.model_files.weight_files import format_of

COMPLETE = ".complete"
"""The file that marks a folder from a hub as fetched to the end."""
_GGUF = ".gguf"


@dataclass(frozen=True)
class LocalModel:
    """A model that is here. `name` is what `serve` and `rm` take: its path, when it lies outside the models folder."""

    name: str
    path: Path
    is_pulled: bool
    """True when it lies in the models folder."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk, links not followed."""
        return folder_bytes(self.path)

    @property
    def format(self) -> str:
        """The form of its weights, such as "GGUF Q4_1", "safetensors bfloat16" or "converted, uint4, 2 ranks"."""
        try:
            return _format(self.path)
        except (AllspanError, OSError, ValueError, KeyError, TypeError):
            return "unreadable"

    def as_json(self) -> dict[str, Any]:
        facts = {"name": self.name, "path": str(self.path), "format": self.format, "num_bytes": self.num_bytes}
        return {**facts, "in_models_folder": self.is_pulled}

    def remove(self) -> None:
        """Removes a pulled model's file or folder (of a link, the link alone), and its ORG folder once it is empty.

        ConfigError while another process fetches it.
        """
        with locked_at_once(self.path) as is_held:
            if not is_held:
                raise ConfigError(f"{self.name} is being fetched by another process; end that first, or wait for it")
            self._remove_files()
            lock_path(self.path).unlink(missing_ok=True)
        if self.path.parent != models_dir():
            with suppress(OSError):  # other models are in it
                self.path.parent.rmdir()

    def _remove_files(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            (self.path / COMPLETE).unlink(missing_ok=True)  # half of a model must not pass for all of it
            shutil.rmtree(self.path)
        else:
            self.path.unlink()


def local_models() -> list[LocalModel]:
    """Returns all of them by name; what was removed meanwhile, or is no model, is not among them."""
    found = {model.path: model for model in (*_pulled(models_dir()), *_converted())}
    return sorted(found.values(), key=lambda model: model.name.lower())


def find_local(name: str) -> LocalModel | None:
    """Returns the model of the models folder that `name` names; None when there is none, ConfigError for several."""
    return the_one(name, _pulled(models_dir()))


def the_one(name: str, models: Iterable[LocalModel]) -> LocalModel | None:
    """Returns the model of this name, or without one that of this name in another case. ConfigError for several."""
    alike = [model for model in models if model.name.lower() == name.lower()]
    found = [model for model in alike if model.name == name] or alike
    if len(found) > 1:
        listed = ", ".join(sorted(str(model.path) for model in found))
        raise ConfigError(f"{name!r} names {len(found)} models; give the path of one: {listed}")
    return found[0] if found else None


def remember_converted(folder: Path) -> None:
    """Notes a folder that a conversion has made, for `allspan list`."""
    known = _noted()
    if folder not in known and not folder.is_relative_to(models_dir()):
        _note().parent.mkdir(parents=True, exist_ok=True)
        _note().write_text("".join(f"{path}\n" for path in [*known, folder] if is_converted(path)), encoding="utf-8")


def folder_bytes(path: Path) -> int:
    """Returns the bytes of a file, or of all files below a folder; what goes away meanwhile counts as nothing."""
    if path.is_symlink() or not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _pulled(folder: Path) -> Iterator[LocalModel]:
    for path in _visible(folder):
        if path.is_file() and path.suffix == _GGUF:
            yield LocalModel(path.stem, path, True)
        elif _is_model(path):
            yield LocalModel(path.name, path, True)
        elif path.is_dir():
            yield from (LocalModel(f"{path.name}/{part.name}", part, True) for part in _visible(path) if part.is_dir())


def _visible(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    return path.is_dir() and ((path / "config.json").is_file() or is_converted(path))


def _converted() -> Iterator[LocalModel]:
    yield from (LocalModel(str(path), path, False) for path in _noted() if is_converted(path))


def _note() -> Path:
    return home() / "converted.txt"


def _noted() -> list[Path]:
    try:
        return [Path(line) for line in _note().read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError):
        return []


def _format(path: Path) -> str:
    if path.is_file():
        return f"GGUF {_gguf_type(path)}"
    if is_converted(path):
        manifest = read_manifest(path)
        held = manifest.held.get("quantization", "none")
        kind = manifest.held.get("dtype", "auto") if held in ("none", "auto") else held
        ranks = len(manifest.ranks)
        return f"converted, {'' if kind == 'auto' else f'{kind}, '}{counted(ranks, 'rank')}"
    if not (path / "config.json").is_file():
        files = list(path.glob(f"*{_GGUF}"))
        return f"GGUF {_gguf_type(files[0])}" if files else "incomplete"
    config = read_json_object(path / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype") or "?"
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    weights = format_of(path)
    return f"{weights.suffix.removeprefix('.')} {method or dtype}" if weights else "incomplete"


def _gguf_type(path: Path) -> str:
    """Returns the type that holds most of the weights, as "Q4_1"."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    from allspan.protos.text.tokenizers.gguf_metadata import read_header

    sizes: Counter[int] = Counter()
    for tensor in read_header(path).tensors:
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        sizes[tensor.kind] += prod(tensor.shape) * num_bytes // block
    return GGMLQuantizationType(sizes.most_common(1)[0][0]).name if sizes else "without tensors"
