"""The sampling defaults and end-of-sequence ids that a model's files carry: generation_config.json, GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError, InvalidRequest
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.model_files.json_values import read_json_object, shown
from allspan.protos.model_files.limits import MAX_VOCABULARY
from allspan.protos.model_files.regular_file import is_there
from allspan.protos.text.tokenizers.gguf_ends import end_ids
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of, read_metadata
from allspan.protos.text.vendors.families import end_ids as family_ends


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults that a model's publisher recommends; None where there is none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling(self) -> dict[str, Any]:
        """The values that are set, as keyword arguments of SamplingParams."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}


FIELDS = tuple(field.name for field in fields(GenerationDefaults) if field.name != "eos_token_ids")
"""The sampling fields that can have a default of their own."""
GENERATION_CONFIG = "generation_config.json"

_GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""The field of SamplingParams for each key that llama.cpp's converter writes of a generation_config.json."""


def generation_defaults(path: str | Path) -> GenerationDefaults:
    """Returns the defaults that a model folder or a GGUF file carries; empty when it has none. A bad value is a
    CheckpointError that names it."""
    path = Path(path)
    if gguf := gguf_of(path):
        return gguf_defaults(gguf, read_metadata(gguf))
    return folder_defaults(path)


def folder_defaults(folder: Path) -> GenerationDefaults:
    """Returns what a folder's generation_config.json says, and the ids that end an answer of its family's publisher.
    CheckpointError."""
    file = folder / GENERATION_CONFIG
    ends = family_ends(folder)
    if not is_there(file):
        return GenerationDefaults(eos_token_ids=ends)
    values = read_json_object(file)
    try:
        sampling = sampling_of(values)
    except InvalidRequest as error:
        message = error.message.replace("max_tokens", "max_new_tokens", 1)  # its name in that file
        raise CheckpointError(f"{file}: {message}") from error
    ids = dict.fromkeys((*_ids(file, values.get("eos_token_id")), *ends))
    return GenerationDefaults(eos_token_ids=tuple(ids), **sampling)


def gguf_defaults(file: Path, metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Returns what the metadata of a GGUF file says. CheckpointError."""
    given = {ours: value for key, ours in _GGUF_NAMES.items() if (value := metadata.get(key)) is not None}
    try:
        sampling = sampling_of(given)
    except InvalidRequest as error:
        key = next((key for key, ours in _GGUF_NAMES.items() if ours == error.field), "general.sampling")
        raise CheckpointError(f"{file}: {error.message.replace(error.field or key, key, 1)}") from error
    return GenerationDefaults(eos_token_ids=end_ids(metadata), **sampling)


def sampling_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling fields among the values of a generation_config.json, checked; `do_sample` false becomes
    temperature 0, so that a request that gives a temperature does sample. InvalidRequest names a bad one."""
    names = {name: name for name in (*FIELDS, "do_sample")} | {"max_new_tokens": "max_tokens"}
    sampling = {ours: value for theirs, ours in names.items() if (value := values.get(theirs)) is not None}
    if not SamplingParams(**sampling).do_sample:
        sampling["temperature"] = 0.0
    sampling.pop("do_sample", None)
    return sampling


def _ids(file: Path, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    for entry in values:
        if type(entry) is not int or not 0 <= entry < MAX_VOCABULARY:
            raise CheckpointError(
                f"{file}: eos_token_id is {shown(value)}, must be a token id (below {MAX_VOCABULARY}) or a list of them"
            )
    return tuple(dict.fromkeys(values))
