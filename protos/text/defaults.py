"""The sampling defaults of a model: the values of a request that does not set them, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.api.sampling import SAMPLING_FIELDS, SamplingParams
from allspan.protos.config.flags import nearest
from allspan.protos.config.generation import AUTO, AUTOMATIC, NEUTRAL, GenerationConfig
from allspan.protos.model_files.json_values import read_json_object
from allspan.protos.model_files.regular_file import is_there
from allspan.protos.text.known_defaults import known_defaults
from allspan.protos.text.model_defaults import FIELDS, GENERATION_CONFIG, folder_defaults, gguf_defaults, sampling_of
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of, names_of, read_metadata
from allspan.protos.text.vendors.chat_formats import has_format
from allspan.protos.text.vendors.families import family_of
from allspan.protos.text.vendors.gguf import gguf_format

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
MAX_TOKENS = 128
"""Most new tokens of a request in Python that gives no parameters, unless the model's files say a number."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The fields of SamplingParams that a model, or the server's operator, gives another default."""

    values: Mapping[str, Any]
    """The fields that the model sets."""
    source: str
    """Where they come from, as part of a sentence."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The fields that the operator sets, which go before the model's."""

    def sampling(self) -> dict[str, Any]:
        """What a request that sets no field gets, as keyword arguments of SamplingParams."""
        return self.under({})

    def under(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request that gives these. Where the request or the operator asks for the most likely tokens,
        the model's penalties are left out: they were chosen for its own temperature."""
        asked = {**self.overrides, **given}
        is_greedy = asked.get("temperature") == 0 or asked.get("do_sample") is False
        return {name: value for name, value in self.values.items() if not (is_greedy and name in PENALTIES)} | asked

    def described(self) -> dict[str, Any]:
        """Every field that can have such a default with the value that applies, max_tokens only where it has one."""
        neutral = {name: SAMPLING_FIELDS[name][0] for name in FIELDS if name != "max_tokens"}
        return neutral | self.sampling()

    def sentence(self) -> str:
        """What applies and why, for the log."""
        shown = ", ".join(f"{name} {value:g}" for name, value in self.sampling().items()) or "temperature 1, no filters"
        return f"a request that sets no sampling fields gets {shown} (from {self.source})"


def sampling_defaults(path: str | Path, name: str = "", config: GenerationConfig = AUTOMATIC) -> SamplingDefaults:
    """Returns the defaults of a model folder or GGUF file that is called `name`, too. A file with a bad value is a
    CheckpointError, a bad flag a ConfigError; both name it."""
    base = _base(Path(path), name, config.generation_config)
    if not (given := config.overrides()):
        return base
    if unknown := [key for key in given if key not in (*FIELDS, "max_new_tokens", "do_sample")]:
        raise ConfigError(
            f"--override-generation-config has {unknown[0]!r}{nearest(unknown[0], FIELDS)}; it may set "
            f"{', '.join(FIELDS)}, do_sample"
        )
    try:
        values = sampling_of(given)
        SamplingParams(**(base.sampling() | values))
    except InvalidRequest as error:
        raise ConfigError(f"--override-generation-config: {error.message}") from error
    return SamplingDefaults(base.values, f"{base.source}, and --override-generation-config", values)


def default_params(path: str | Path, name: str = "") -> SamplingParams:
    """The parameters of a request in Python that gives none. Raises as `sampling_defaults` does."""
    return SamplingParams(**({"max_tokens": MAX_TOKENS} | sampling_defaults(path, name).sampling()))


def _base(path: Path, name: str, source: str) -> SamplingDefaults:
    if source in NEUTRAL:
        return SamplingDefaults({}, f"--generation-config {source}")
    if source == AUTO:
        return _automatic(path, name)
    folder = Path(source).expanduser()
    if not (folder / GENERATION_CONFIG).is_file():
        raise ConfigError(
            f"--generation-config is {source!r}, must be {AUTO}, {' or '.join(NEUTRAL)}, or a folder with a "
            f"{GENERATION_CONFIG}"
        )
    return SamplingDefaults(folder_defaults(folder).sampling(), f"{folder / GENERATION_CONFIG}")


def _automatic(path: Path, name: str) -> SamplingDefaults:
    """A file that sets one field of the distribution is taken as it is: what it leaves out is neutral."""
    if gguf := gguf_of(path):
        metadata = read_metadata(gguf)
        own, source = gguf_defaults(gguf, metadata).sampling(), "the model's GGUF metadata"
        architecture, names = str(metadata.get("general.architecture", "")), names_of(metadata)
        can_chat = bool(metadata.get("tokenizer.chat_template") or gguf_format(metadata, [*names, path.stem]))
    else:
        own, source = folder_defaults(path).sampling(), f"the model's {GENERATION_CONFIG}"
        architecture, names = _folder_names(path)
        can_chat = _has_chat_template(path)
    if own.keys() - {"max_tokens"}:
        return SamplingDefaults(own, source)
    known = known_defaults([*names, path.stem if gguf else path.name, name], architecture, can_chat)
    return SamplingDefaults({**known.values, **own}, known.source)


def _folder_names(path: Path) -> tuple[str, list[str]]:
    file = path / "config.json"
    values = read_json_object(file) if file.is_file() else {}
    name = values.get("_name_or_path")
    return str(values.get("model_type", "")), [name.rsplit("/", 1)[-1]] if isinstance(name, str) else []


def _has_chat_template(folder: Path) -> bool:
    files = [file for name in ("chat_template.json", "tokenizer_config.json") if is_there(file := folder / name)]
    if is_there(folder / "chat_template.jinja") or any(read_json_object(f).get("chat_template") for f in files):
        return True
    return has_format(folder, family_of(folder))
