"""A model's own sampling defaults, from its generation_config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.errors import CheckpointError, InvalidRequest
from allspan.protos.json_file import read_json_object
from allspan.protos.sampling import SamplingParams
from allspan.protos.text.gguf_metadata import read_metadata
from allspan.protos.text.gguf_tokenizer import end_ids


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the publisher recommends; None where nothing is said."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def sampling(self) -> dict[str, Any]:
        """The values that are set, as keyword arguments of SamplingParams."""
        names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def generation_defaults(path: str | Path) -> GenerationDefaults:
    """Of a model folder or a GGUF file; empty when it says nothing. A bad value is a CheckpointError that names it."""
    path = Path(path)
    if path.is_file():
        return GenerationDefaults(eos_token_ids=end_ids(read_metadata(path)))
    file = path / "generation_config.json"
    if not file.is_file():
        return GenerationDefaults()
    values = read_json_object(file)
    defaults = GenerationDefaults(
        temperature=0.0 if values.get("do_sample") is False else values.get("temperature"),
        top_k=values.get("top_k"),
        top_p=values.get("top_p"),
        min_p=values.get("min_p"),
        max_tokens=values.get("max_new_tokens"),
        eos_token_ids=_ids(file, values.get("eos_token_id")),
    )
    try:
        SamplingParams(**defaults.sampling())
    except InvalidRequest as error:
        message = error.message.replace("max_tokens", "max_new_tokens", 1)  # its name in that file
        raise CheckpointError(f"{file}: {message}") from error
    return defaults


def _ids(file: Path, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    for entry in values:
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
            raise CheckpointError(f"{file}: eos_token_id is {value!r}, must be a token id or a list of them")
    return tuple(dict.fromkeys(values))
