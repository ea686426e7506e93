"""A model's own sampling defaults, from its generation_config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError, InvalidRequest
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.json_file import read_json_object
from allspan.protos.text.tokenizers.gguf_ends import end_ids
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of, read_metadata


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

    def sampling(self) -> dict[str, Any]:
        """The values that are set, as keyword arguments of SamplingParams."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "eos_token_ids")
        return {name: value for name, value in values if value is not None}


_NAMES = {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "do_sample")
} | {"max_new_tokens": "max_tokens"}
"""The field of SamplingParams for each name in generation_config.json."""


def generation_defaults(path: str | Path) -> GenerationDefaults:
    """Returns the defaults of a model folder or a GGUF file; empty when it has none. A bad value is a CheckpointError
    that names it."""
    path = Path(path)
    if gguf := gguf_of(path):
        return GenerationDefaults(eos_token_ids=end_ids(read_metadata(gguf)))
    file = path / "generation_config.json"
    if not file.is_file():
        return GenerationDefaults()
    values = read_json_object(file)
    sampling = {ours: value for theirs, ours in _NAMES.items() if (value := values.get(theirs)) is not None}
    try:
        params = SamplingParams(**sampling)
    except InvalidRequest as error:
        message = error.message.replace("max_tokens", "max_new_tokens", 1)  # its name in that file
        raise CheckpointError(f"{file}: {message}") from error
    if not params.do_sample:  # so a caller who gives a temperature does sample
        sampling["temperature"] = 0.0
    sampling.pop("do_sample", None)
    return GenerationDefaults(eos_token_ids=_ids(file, values.get("eos_token_id")), **sampling)


def _ids(file: Path, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    for entry in values:
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
            raise CheckpointError(f"{file}: eos_token_id is {value!r}, must be a token id or a list of them")
    return tuple(dict.fromkeys(values))
