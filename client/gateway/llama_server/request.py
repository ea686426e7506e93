"""A request for /completion, as the completion that answers it."""

from __future__ import annotations

import reprlib
from typing import Any

from pydantic import Field

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.openai.extra_fields import check_extras
from allspan.client.gateway.openai.renamed import renamed
from allspan.client.gateway.openai.schemas import RequestBody
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

_SAME = (
    *("prompt", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "stop"),
    *("ignore_eos", "stream"),
)
"""The fields that mean the same in a completion."""
_INERT = frozenset(
    (
        *("id_slot", "n_keep", "n_discard", "n_indent", "min_keep", "samplers", "sampler_seq", "repeat_last_n"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent"),
        *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        *("dry_sequence_breakers", "top_n_sigma", "tfs_z", "penalize_nl", "post_sampling_probs", "timings_per_token"),
        *("response_fields", "t_max_predict_ms", "t_max_prompt_ms", "return_progress", "n_cache_reuse"),
        "backend_sampling",
    )
)
"""Fields that change nothing here."""
_NAMES = {
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
}


class LlamaRequest(RequestBody):
    """POST /completion."""

    prompt: Any = Field(None, json_schema_extra={"anyOf": [{"type": "string", "minLength": 1}]})
    n_predict: int | None = Field(None, json_schema_extra={"title": "N Predict"})
    max_tokens: int | None = Field(None, json_schema_extra={"title": "Max Tokens"})
    """`n_predict` under another name."""
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = Field(None, json_schema_extra={"title": "Logit Bias"})
    n_probs: int | None = Field(None, json_schema_extra={"title": "N Probs"})
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    grammar: str | None = None
    json_schema: Any = None

    def check(self, limits: LimitsConfig) -> None:
        extras = {name: value for name, value in (self.model_extra or {}).items() if name not in _INERT}
        check_extras(extras, self.known, limits.strict)
        if isinstance(self.prompt, list) and any(isinstance(item, (str, list)) for item in self.prompt):
            raise InvalidRequest(
                "prompt is a list of texts, must be one text or token ids here; /v1/completions takes several", "prompt"
            )

    @property
    def most_tokens(self) -> int | None:
        """The length of the output; None for what the context has left."""
        most = self._limit
        return most if most is not None and most > 0 else None

    @property
    def _limit(self) -> int | None:
        return self.n_predict if self.n_predict is not None else self.max_tokens

    def completion(self) -> Json:
        """Returns the equivalent body for /v1/completions, but for the length; InvalidRequest names what does not
        fit."""
        body: Json = {name: getattr(self, name) for name in _SAME} | {"model": self.model}
        body |= {"guided_grammar": self.grammar or None, "guided_json": self.json_schema or None}
        body |= {"repetition_penalty": self.repeat_penalty, "logit_bias": _biases(self.logit_bias)}
        body |= {"seed": None if self.seed == -1 else self.seed, "logprobs": self.n_probs or None}
        if self.cache_prompt is False:
            body["prefix_cache"] = False
        if self._limit == 0:  # the prompt is read, nothing is written
            body |= {"echo": True, "max_tokens": 0}
        return body


def in_our_words(error: InvalidRequest) -> InvalidRequest:
    """Returns an error of the completion with llama-server's names of fields."""
    return renamed(error, _NAMES)


def _biases(value: Any) -> Json | None:
    """Returns OpenAI's `logit_bias` for an object, or for a list of [token id, bias]; a bias of false is the least."""
    if not value:
        return None
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise InvalidRequest(f"logit_bias is {reprlib.repr(value)}, must be a list of [token id, bias]", "logit_bias")
    return {str(token): -100.0 if bias is False else bias for token, bias in pairs}
