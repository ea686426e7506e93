"""Turns the sampling fields of a request into parameters that this server accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allspan.client.gateway.admission.bad_words import bad_words_ids
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.served_model import ServedModel
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text import Tokenizer

MAX_PROMPT_LOGPROBS = 1 << 17
"""Most log-probabilities of one prompt; each becomes an object in the answer, and all of them at once."""


class SamplingValidator:
    """Fills sampling fields up with the model's defaults, and refuses what the model or this server does not allow."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, limits: LimitsConfig) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._limits = limits

    def fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `SamplingParams`: `bad_words`, which are texts, become `bad_words_ids`."""
        fields = dict(given)
        if words := fields.pop("bad_words", None):
            ids = bad_words_ids(self._tokenizer, words)
            fields["bad_words_ids"] = (*fields.get("bad_words_ids", ()), *ids)
        return fields

    def params(
        self, given: Mapping[str, Any], num_prompt_tokens: int, default_max_tokens: int | None
    ) -> SamplingParams:
        """Given fields over the model's defaults; max_tokens is `default_max_tokens`, else the
        model's, else the rest of the context."""
        room = self._model.max_model_len - num_prompt_tokens
        defaults = self._model.defaults
        most = min(room, default_max_tokens or defaults.sampling().get("max_tokens", room))
        params = SamplingParams(**defaults.under({"max_tokens": most, **given}))
        if params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens} after a prompt of {num_prompt_tokens} tokens, at most {room}: the "
                f"context has {self._model.max_model_len}",
                "max_tokens",
            )
        self._check_limits(params, num_prompt_tokens)
        params.check_vocabulary(self._model.vocab_size)
        return params

    def _check_limits(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raises InvalidRequest for what an engine could do and this server does not allow."""
        told = num_prompt_tokens * (1 + (params.prompt_logprobs or 0))
        if params.prompt_logprobs is not None and told > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs is {params.prompt_logprobs} for a prompt of {num_prompt_tokens} tokens, which are "
                f"{told} log-probabilities, at most {MAX_PROMPT_LOGPROBS}: ask for fewer, or of shorter prompts",
                "prompt_logprobs",
            )
        if len(params.stop) > self._limits.max_stop_sequences:
            raise InvalidRequest(
                f"stop has {len(params.stop)} entries, at most {self._limits.max_stop_sequences}", "stop"
            )
        for field in ("logprobs", "prompt_logprobs"):
            if (count := getattr(params, field) or 0) > self._limits.max_logprobs:
                raise InvalidRequest(f"{field} is {count}, must be from 0 to {self._limits.max_logprobs}", field)
