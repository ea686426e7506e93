"""A folder of PEFT's: two matrices for each layer that an adapter changes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.regular_file import Opener, is_there, open_regular
from allspan.worker.adapters.peft_config import read_peft_config
from allspan.worker.weights.tensor_folder import TensorFolder

WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(lora_(?P<side>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|(?P<copy>base_layer)\.weight)"
)
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.layers.", "model.layers."),
    ("language_model.embed_tokens", "model.embed_tokens"),
    ("language_model.", ""),
    ("layers.", "model.layers."),
    ("embed_tokens", "model.embed_tokens"),
)
"""Beginnings of modules of models of images and text, and of models without a head, and those of a model of text with
one."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of one module: x · aᵀ · bᵀ is added to its product. a [r, in], b [out, r], with the factor that
    the config says. Inputs of an embedding are tokens."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return len(self.a)


class PeftFolder:
    """The matrices of an adapter, by the names of the base model's modules ("model.layers.0.self_attn.q_proj"). Their
    file may be written meanwhile: then reading fails."""

    def __init__(self, folder: Path, opener: Opener = open_regular) -> None:
        """Reads the headers. Raises CheckpointError for what PEFT does not write, and for what is not supported."""
        if not is_there(folder / WEIGHTS_FILE):
            raise CheckpointError(
                f"{folder}: {WEIGHTS_FILE} is missing: an adapter is a folder with {WEIGHTS_FILE} and its config, as "
                "PEFT saves it; adapter_model.bin is not read"
            )
        self.path = folder / WEIGHTS_FILE
        config, self._tensors = read_peft_config(folder, opener), TensorFolder(folder, WEIGHTS_FILE, opener)
        sides: dict[str, dict[str, str]] = {}
        self.embeddings: set[str] = set()
        """Modules that are changed where tokens are looked up."""
        self.copies: dict[str, tuple[int, ...]] = {}
        """The shapes of base weights that PEFT saves beside the adapters of an embedding and a head."""
        for name in self._tensors.names():
            if (found := _NAME.fullmatch(name)) is None:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is not supported: adapters are lora_A and lora_B of linear layers, "
                    "and lora_embedding_A and lora_embedding_B of the embedding"
                )
            if found["copy"]:
                self.copies[_module(found["module"])] = self._tensors.shape(name)
                continue
            if found["embedding"]:
                self.embeddings.add(_module(found["module"]))
            side = found["side"] or found["embedding"]
            if side in sides.setdefault(found["module"], {}):
                raise CheckpointError(f"{self.path}: {found['module']!r} has two lora_{side}: remove one of both")
            sides[found["module"]][side] = name
        if not sides:
            raise CheckpointError(f"{self.path}: there are no tensors")
        factors = config.factors(list(sides))
        self._modules: dict[str, tuple[str, str, float]] = {}
        for module, names in sides.items():
            if (usual := _module(module)) in self._modules:
                raise CheckpointError(f"{self.path}: {module!r} is there under another name, too: remove one of both")
            self._modules[usual] = self._checked(module, names, *factors[module])

    @property
    def modules(self) -> Collection[str]:
        return self._modules.keys()

    @property
    def rank(self) -> int:
        """The highest rank of a module."""
        return max(self._tensors.shape(a)[0] for a, _, _ in self._modules.values())

    def shape(self, module: str) -> tuple[int, int]:
        """Outputs and inputs of the module that is changed."""
        a, b, _ = self._modules[module]
        return self._tensors.shape(b)[0], self._tensors.shape(a)[1]

    def matrices(self, module: str, dtype: torch.dtype, factor: float = 1.0) -> LowRank:
        """Reads a module's matrices, whose product with `factor` is added. Raises CheckpointError for numbers that are
        not finite in this dtype."""
        a, b, scale = self._modules[module]
        return LowRank(self._read(a, 1.0, dtype), self._read(b, scale * factor, dtype))

    def _read(self, name: str, scale: float, dtype: torch.dtype) -> Tensor:
        read = self._tensors.floats(name)
        if scale == 1.0:
            out = read.to(dtype)
        elif read.dtype == dtype:  # 16 bits are multiplied in float32 and rounded once, too
            out = read.mul_(scale)
        else:
            out = read.to(torch.float32).mul_(scale).to(dtype)
        # The sum is quicker than a look at each number, and is finite only where all of them are.
        if not math.isfinite(out.sum(dtype=torch.float32)) and not out.isfinite().all():
            raise CheckpointError(
                f"{self.path}: tensor {name!r}, times {scale:g}, has numbers that are not finite in {dtype}"
            )
        return out

    def _checked(self, module: str, names: Mapping[str, str], rank: int, scale: float) -> tuple[str, str, float]:
        """The names of a module's matrices and their scale. Raises CheckpointError for shapes of another rank."""
        for side in "AB":
            if side not in names:
                raise CheckpointError(f"{self.path}: lora_{side} of {module!r} is missing")
        a, b = (self._tensors.shape(names[side]) for side in "AB")
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not all((*a, *b)):
            raise CheckpointError(
                f"{self.path}: lora_A and lora_B of {module!r} have shapes {list(a)} and {list(b)}, must be [r, in] "
                "and [out, r]"
            )
        if a[0] != rank:
            raise CheckpointError(f"{self.path}: lora_A of {module!r} has rank {a[0]}, adapter_config.json says {rank}")
        return names["A"], names["B"], scale


def _module(name: str) -> str:
    """The name that a model of text with a head has for the module."""
    return next((new + name[len(old) :] for old, new in _PREFIXES if name.startswith(old)), name)


@dataclass(slots=True)
class OutputRows:
    """A checkpoint of b, under the names of the weights that are changed, so that rows are found as those of the base
    model's weights are."""

    folder: PeftFolder
    matrices: Mapping[str, LowRank]
    """The matrices of each module; one that is missing changes nothing."""
    naming: str = "hugging_face"

    def names(self) -> Collection[str]:
        return [f"{module}.weight" for module in self.matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.matrices[name.removesuffix(".weight")].b.shape)

    def where(self, name: str) -> Path:
        return self.folder.path

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        """Columns behind the module's rank are zeros."""
        rows, columns = ranges
        if (found := self.matrices.get(name.removesuffix(".weight"))) is not None:
            own = found.b[rows.start : rows.stop : rows.step, columns.start : columns.stop]
            out[:, : own.shape[1]] = own
            out[:, own.shape[1] :] = 0
        else:
            out.zero_()

    def release(self) -> None:
        return
