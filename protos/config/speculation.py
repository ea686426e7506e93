"""Speculation: what `speculative_config` says, a JSON object with the keys of vLLM's flag."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import WorkerConfig
from allspan.protos.model_files.json_values import parse_object, shown

METHODS = ("suffix", "ngram")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are drafted."""

    method: str = "suffix"
    """ "suffix": what followed the last tokens before, in the request or in earlier answers, and what a grammar forces;
    "ngram": what followed them first in the request."""
    num_speculative_tokens: int = 31
    """Most drafts of a request in a step."""
    prompt_lookup_min: int = 0
    """ngram: tokens that must occur again; 0 takes `prompt_lookup_max`, or 5."""
    prompt_lookup_max: int = 0
    """ngram: tokens that are compared at most; 0 takes `prompt_lookup_min`."""
    suffix_decoding_max_tree_depth: int = 24
    """suffix: tokens that are compared at most."""
    suffix_decoding_max_cached_requests: int = 10_000
    """suffix: earlier answers that are kept for each cache salt; 0 keeps none."""
    suffix_decoding_max_spec_factor: float = 4.0
    """suffix: most drafts for each token that occurred again."""
    suffix_decoding_min_token_prob: float = 0.0
    """suffix: the least chance that a draft is kept; 0 leaves it to the controller."""


LIMITS: dict[str, tuple[float, float]] = {
    "num_speculative_tokens": (1, 63),
    "prompt_lookup_min": (0, 64),
    "prompt_lookup_max": (0, 64),
    "suffix_decoding_max_tree_depth": (2, 64),
    "suffix_decoding_max_cached_requests": (0, 1 << 20),
    "suffix_decoding_max_spec_factor": (0.1, 64),
    "suffix_decoding_min_token_prob": (0, 1),
}


def parse_speculation(text: str) -> Speculation | None:
    """The settings; None for "", which asks for none. Raises ConfigError, naming the key."""
    if not text:
        return None
    try:
        values = parse_object(text.encode(errors="surrogatepass"), "speculative_config")
    except CheckpointError as error:
        raise ConfigError(f'{error}; write it as \'{{"method": "suffix"}}\'') from None
    known = [field.name for field in fields(Speculation)]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"speculative_config has the key {key[:64]!r}, known are {', '.join(known)}")
        values[key] = _checked(key, value)
    if values.get("method", METHODS[0]) not in METHODS:
        raise ConfigError(f"speculative_config: method is {shown(values['method'])}, must be {' or '.join(METHODS)}")
    least, most = (values.get(f"prompt_lookup_{end}") or 0 for end in ("min", "max"))
    least, most = least or most or 5, most or least or 5
    if least > most:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min is {least}, must be at most prompt_lookup_max ({most})"
        )
    return Speculation(**values | {"prompt_lookup_min": least, "prompt_lookup_max": most})


def speculation_of(config: WorkerConfig) -> Speculation | None:
    """What a rank's settings ask for; None: nothing. Raises ConfigError where that cannot be had."""
    asked, device = parse_speculation(config.scheduler.speculative_config), config.model.device
    if asked is None:
        return None
    if device != "cpu":
        raise ConfigError(f"speculative_config is given, but tokens are not drafted on {device}: use --device cpu")
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "speculative_config is given, but tokens are not drafted in pipelines, whose stages have other requests' "
            "steps to fill: use tensor parallelism"
        )
    return asked


def _checked(key: str, value: Any) -> Any:
    kind = get_type_hints(Speculation)[key]
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise ConfigError(f"speculative_config: {key} is {str(value)[:64]!r}, must be of type {kind.__name__}")
    low, high = LIMITS.get(key, (0, 0))
    if key in LIMITS and not low <= value <= high:  # an integer may be larger than a float can be
        raise ConfigError(f"speculative_config: {key} is {shown(value)}, must be from {low:g} to {high:g}")
    return kind(value)
