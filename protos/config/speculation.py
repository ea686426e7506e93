"""Speculation: what `speculative_config` says, a JSON object with the keys of vLLM's flag."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from allspan.protos.api.errors import CheckpointError, ConfigError, ModelNotFound
from allspan.protos.config.settings import WorkerConfig
from allspan.protos.model_files.json_values import parse_object, shown

DRAFT_MODEL, EAGLE3, MTP = "draft_model", "eagle3", "mtp"
METHODS = ("suffix", "ngram", DRAFT_MODEL, EAGLE3, MTP)
_ALIASES = {"deepseek_mtp": MTP}
_WITH_MODEL = DRAFT_MODEL, EAGLE3
MODEL_TOKENS = 7
"""Most drafts of a model in a step, unasked: each of them takes a step of it."""
REPLAY = "replay"
"""The method of benchmarks: drafts what the same prompt was answered with before, a chosen share of it wrong."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are drafted."""

    method: str = "suffix"
    """ "suffix": what followed the last tokens before, in the request or in earlier answers, and what a grammar forces;
    "ngram": what followed them first in the request; "draft_model": what a smaller model says next; "eagle3": what an
    EAGLE-3 head says, which reads states of the model; "mtp": what the model's own layer for multi-token prediction
    says."""
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
    model: str = ""
    """draft_model: the name, folder or file of the model that drafts, which has the same tokens; eagle3: the name or
    folder of the head."""
    quantization: str = "auto"
    """draft_model, eagle3: how its weights are held, one of those of --quantization."""
    draft_tensor_parallel_size: int = 0
    """draft_model, eagle3: the ranks that share it, which are those of the model; 0 leaves it out."""
    replay_rate: float = 1.0
    """replay: the share of drafts that are right."""


LIMITS: dict[str, tuple[float, float]] = {
    "num_speculative_tokens": (1, 63),
    "draft_tensor_parallel_size": (0, 1 << 20),
    "prompt_lookup_min": (0, 64),
    "prompt_lookup_max": (0, 64),
    "suffix_decoding_max_tree_depth": (2, 64),
    "suffix_decoding_max_cached_requests": (0, 1 << 20),
    "suffix_decoding_max_spec_factor": (0.1, 64),
    "suffix_decoding_min_token_prob": (0, 1),
    "replay_rate": (0.01, 1),
}


def parse_speculation(text: str) -> Speculation | None:
    """The settings; None for "", which asks for none. Raises ConfigError, naming the key."""
    if not text:
        return None
    try:
        values = parse_object(text.encode(errors="surrogatepass"), "speculative_config")
    except CheckpointError as error:
        raise ConfigError(f'{error}; write it as \'{{"method": "suffix"}}\'') from None
    known = [field.name for field in fields(Speculation) if field.name != "replay_rate"]
    for key, value in values.items():
        if key not in known and (key, values.get("method")) != ("replay_rate", REPLAY):
            raise ConfigError(f"speculative_config has the key {key[:64]!r}, known are {', '.join(known)}")
        values[key] = _checked(key, value)
    method = values.setdefault("method", DRAFT_MODEL if values.get("model") else METHODS[0])
    method = values["method"] = _ALIASES.get(method, method)
    if method not in (*METHODS, REPLAY):
        raise ConfigError(f"speculative_config: method is {shown(method)}, must be one of {', '.join(METHODS)}")
    _check_model(method, values)
    least, most = (values.get(f"prompt_lookup_{end}") or 0 for end in ("min", "max"))
    least, most = least or most or 5, most or least or 5
    if least > most:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min is {least}, must be at most prompt_lookup_max ({most})"
        )
    return Speculation(**values | {"prompt_lookup_min": least, "prompt_lookup_max": most})


def with_draft_model(text: str, find: Callable[[str], str]) -> str:
    """The same settings with the path of the model that drafts, which `find` finds by its name. Raises ModelNotFound,
    naming the key."""
    asked = parse_speculation(text)
    if asked is None or asked.method not in _WITH_MODEL:
        return text
    try:
        path = find(asked.model)
    except ModelNotFound as error:
        raise ModelNotFound(f"speculative_config: {error.message}") from error
    return json.dumps(json.loads(text) | {"model": path})


def speculation_of(config: WorkerConfig) -> Speculation | None:
    """What a rank's settings ask for; None: nothing. Raises ConfigError where that cannot be had."""
    asked = parse_speculation(config.scheduler.speculative_config)
    if asked is None:
        return None
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "speculative_config is given, but tokens are not drafted in pipelines, whose stages have other requests' "
            "steps to fill: use tensor parallelism"
        )
    return asked


def _check_model(method: str, values: dict[str, Any]) -> None:
    """Raises ConfigError for a model that drafts where the method has none, and the other way round."""
    if method in (*_WITH_MODEL, MTP):
        values.setdefault("num_speculative_tokens", MODEL_TOKENS)
    if method in _WITH_MODEL:
        if not values.get("model"):
            raise ConfigError(
                f"speculative_config: model is missing, which method {method!r} drafts with; write it as "
                f'\'{{"method": "{method}", "model": "NAME_OR_PATH", "num_speculative_tokens": 5}}\''
            )
        return
    for key in ("model", "quantization", "draft_tensor_parallel_size"):
        if key in values:
            drafts = "with layers of the model itself" if method == MTP else "without a model"
            raise ConfigError(
                f"speculative_config: {key} is given, but method {method!r} drafts {drafts}: leave it out, or "
                f"take method {' or '.join(map(repr, _WITH_MODEL))}"
            )


def _checked(key: str, value: Any) -> Any:
    kind = get_type_hints(Speculation)[key]
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise ConfigError(f"speculative_config: {key} is {str(value)[:64]!r}, must be of type {kind.__name__}")
    low, high = LIMITS.get(key, (0, 0))
    if key in LIMITS and not low <= value <= high:  # an integer may be larger than a float can be
        raise ConfigError(f"speculative_config: {key} is {shown(value)}, must be from {low:g} to {high:g}")
    return kind(value)
