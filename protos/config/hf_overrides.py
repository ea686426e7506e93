"""hf_overrides: values that replace those of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.model_files.json_values import parse_object

_EMBEDDING_KEYS = ("is_matryoshka", "matryoshka_dimensions", "classifier_from_token", "is_original_qwen3_reranker")
_ROPE, _OLD_ROPE = "rope_parameters", "rope_scaling"
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""What a rotary embedding keeps when its kind is replaced."""


def parse_overrides(text: str) -> dict[str, Any]:
    """The JSON object; empty for "". Raises ConfigError."""
    if not text:
        return {}
    try:
        values = parse_object(text.encode(errors="surrogatepass"), "hf_overrides")
    except CheckpointError as error:
        raise ConfigError(f"{error}; write it as '{{\"KEY\": VALUE}}', with the keys of config.json") from None
    if found := [key for key in _EMBEDDING_KEYS if key in values]:
        raise ConfigError(
            f"hf_overrides: {found[0]} says how the model embeds, which the gateway reads in config.json: write it "
            "there"
        )
    return values


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the overrides merged in, object by object; null removes a key. `rope_parameters` and its old name
    `rope_scaling` stand for each other, and a new kind of rotary embedding takes no parameters from the old one but
    those of all kinds. Where a model keeps the config of its text in `text_config`, keys that do not stand beside it
    are meant for it."""
    text, values = values.get("text_config"), dict(values)
    if isinstance(text, Mapping):
        named = overrides.get("text_config")
        beside = {key: value for key, value in overrides.items() if key not in values}
        inside = beside | dict(named) if isinstance(named, Mapping) else beside
        values["text_config"] = overridden(text, inside) if inside else text
        overrides = {
            key: value
            for key, value in overrides.items()
            if key not in beside and not (key == "text_config" and isinstance(value, Mapping))
        }
    given = next((key for key in (_ROPE, _OLD_ROPE) if key in overrides), None)
    if given is not None:
        overrides = {_ROPE if key == given else key: value for key, value in overrides.items()}
        found = values.pop(_OLD_ROPE, None)
        values[_ROPE] = _rope(found or values.get(_ROPE), overrides[_ROPE])
    return _merged(values, overrides)


def _rope(found: Any, given: Any) -> Any:
    """What is kept of a rotary embedding beside the one that is given. Raises ConfigError for one where each kind of
    layer has its own."""
    if not isinstance(found, Mapping) or not isinstance(given, Mapping):
        return found
    layers = [key for key, value in found.items() if isinstance(value, Mapping)]
    if layers and "rope_type" in given:
        raise ConfigError(
            f"hf_overrides: rope_parameters of this model are by kind of layer ({', '.join(layers)}): name one, as "
            f'{{"rope_parameters": {{"{layers[0]}": {{…}}}}}}'
        )
    kinds = [each.get("rope_type", each.get("type")) for each in (found, given)]
    if kinds[1] is None or kinds[0] == kinds[1]:
        return found
    return {key: found[key] for key in _KEPT if key in found}


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged
