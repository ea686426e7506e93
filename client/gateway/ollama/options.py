"""Ollama's `options`, `format` and `think`, as fields of a conversation or a completion."""

from __future__ import annotations

import reprlib
from typing import Any

from allspan.client.gateway.openai.extra_fields import check_extras
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

_SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
"""The options that reach the sampler → their names there."""
_OTHERS = frozenset(
    (
        *("num_predict", "repeat_last_n", "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"),
        *("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "numa", "penalize_newline"),
        *("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "draft_num_predict"),
    )
)
NAMES = {
    **{ours: f"options.{theirs}" for theirs, ours in _SAMPLING.items()},
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "reasoning_effort": "think",
}
"""Fields of a conversation → how Ollama's users know them."""


def read_options(options: Json | None, strict: bool) -> tuple[Json, int | None]:
    """Returns the sampling fields, and the length of the output, None for what the context has left. InvalidRequest
    names what does not fit."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    known = {name: name in given for name in (*_SAMPLING, *_OTHERS)}
    try:
        check_extras({name: value for name, value in given.items() if name not in known}, known, strict)
    except InvalidRequest as error:
        raise InvalidRequest(f"options: {error.message}", "options") from None
    fields = {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}
    if fields.get("seed") == -1:  # any
        del fields["seed"]
    if given.get("repeat_last_n") == 0:  # no token is looked at
        fields.pop("repetition_penalty", None)
    limit = given.get("num_predict")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise InvalidRequest(f"options.num_predict is {reprlib.repr(limit)}, must be a number of tokens", "options")
    if limit == 0:
        what = "options.num_predict is 0, must be at least 1, or -1 for what the context has left"
        raise InvalidRequest(what, "options")
    return fields, limit if limit is not None and limit > 0 else None


def response_format(form: Any) -> Json | None:
    """Returns OpenAI's `response_format` for a `format`: "json", a JSON schema, or nothing."""
    if form is None or form == "":
        return None
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    raise InvalidRequest(f'format is {reprlib.repr(form)}, must be "json" or a JSON schema', "format")


def thinking(think: Any) -> Json:
    """Returns the fields of a conversation for a `think`: true, false, or an effort; nothing: as the model does."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"reasoning_effort": "medium" if think else "none", "include_reasoning": think}
    if think in ("low", "medium", "high"):
        return {"reasoning_effort": think}
    raise InvalidRequest(f"think is {reprlib.repr(think)}, must be true, false, low, medium or high", "think")
