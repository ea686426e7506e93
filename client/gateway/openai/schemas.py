"""The OpenAI requests as pydantic models: strict types; `extra_fields` decides about unknown fields. Ranges are checked
once, by `SamplingParams`; here only what it does not know of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.http.errors import HttpError
from allspan.client.gateway.http.json_body import check_json, check_size
from allspan.client.gateway.openai.extra_fields import check_extras
from allspan.client.gateway.openai.structured import FIELDS, grammar_of
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SAMPLING_FIELDS
from allspan.protos.text.stream.text_stream import TextOptions

Prompt = str | list[int]

_SAMPLING = {
    name: rule.request_type for name, (_, rule) in SAMPLING_FIELDS.items() if rule.request_type is not None
} | {"bad_words": list[str]}
"""The fields of `SamplingParams` that requests share, with their types in JSON; `bad_words` become `bad_words_ids`."""
_OPTIONS = ("priority", "timeout_s", "prefix_cache", "cache_salt", "speculation")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; there is none


class RequestBody(BaseModel):
    """The base of every request body that `parse` makes. None is as good as absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str = ""

    @property
    def known(self) -> dict[str, bool]:
        """The fields that the endpoint has, and whether this request gives them."""
        return {name: getattr(self, name) is not None for name in type(self).model_fields}

    def check(self, limits: LimitsConfig) -> None:
        """Checks rules that types cannot express; InvalidRequest names the field."""
        if self.model_extra:
            check_extras(self.model_extra, self.known, limits.strict)


if TYPE_CHECKING:

    class _SamplingTable(RequestBody):
        """The fields of the table that are read by name."""

        max_tokens: int | None
        seed: int | None
        prompt_logprobs: int | None
        logit_bias: dict[str, float] | None
else:
    _SamplingTable = create_model(
        "_SamplingTable", __base__=RequestBody, **{name: (kind | None, None) for name, kind in _SAMPLING.items()}
    )


class SamplingFields(_SamplingTable):
    """The fields that both endpoints share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    # vLLM's, beyond OpenAI's
    priority: int | None = None
    cache_salt: str | None = None
    # this project's own
    timeout_s: float | None = None
    prefix_cache: bool | None = None
    speculation: bool | None = None
    # how prompt and output are read and shown; vLLM's
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # none are put in, either way
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # what the output must be: OpenAI's, and vLLM's newer and older names
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @cached_property
    def _grammar(self) -> tuple[Grammar, str] | None:
        return grammar_of({name: getattr(self, name) for name in FIELDS})

    @property
    def grammar_field(self) -> str:
        """The name of the field that requests structured output, if any does."""
        return "grammar" if self._grammar is None else self._grammar[1]

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far (vLLM's extension)."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    def sampling(self) -> dict[str, Any]:
        """The given fields of `SamplingParams`, and `bad_words` (logprobs aside, whose shape differs per endpoint)."""
        fields = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.seed is not None and self.seed < 0:
            fields["seed"] = self.seed + 2**64  # OpenAI's seeds are signed
        if self.logit_bias is not None:
            fields["logit_bias"] = {_bias_id(key): bias for key, bias in self.logit_bias.items()}
        if self._grammar is not None:
            fields["grammar"], _ = self._grammar
        return fields

    def options(self) -> RequestOptions:
        """Returns the request's options; InvalidRequest names the field."""
        return RequestOptions(**{name: value for name in _OPTIONS if (value := getattr(self, name)) is not None})

    def prompt_options(self) -> PromptOptions:
        """Returns the prompt's options; InvalidRequest names the field."""
        return PromptOptions(
            self.add_special_tokens, last_tokens=self.truncate_prompt_tokens, max_tokens=self.max_tokens
        )

    def text_options(self) -> TextOptions:
        return TextOptions(
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop=bool(self.include_stop_str_in_output),
            detokenize=self.detokenize is not False,
        )

    def check(self, limits: LimitsConfig) -> None:
        super().check(limits)
        if not 1 <= self.choices <= limits.max_n:
            raise InvalidRequest(f"n is {self.n}, must be from 1 to {limits.max_n}", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is given, which needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is given, which needs stream to be false", "prompt_logprobs")


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    parse_special: bool | None = None  # of a text: false reads no special tokens out of it

    def prompt_options(self) -> PromptOptions:
        return replace(super().prompt_options(), parse_special=self.parse_special is not False)

    @property
    def candidates(self) -> int:
        """The number of outputs for each prompt; the choices are the best of them."""
        return self.choices if self.best_of is None else self.best_of

    def check(self, limits: LimitsConfig) -> None:
        super().check(limits)
        most = max(limits.max_best_of, self.choices)
        if not self.choices <= self.candidates <= most:
            raise InvalidRequest(f"best_of is {self.best_of}, must be from n ({self.choices}) to {most}", "best_of")
        if self.stream and self.candidates > self.choices:
            raise InvalidRequest(f"best_of is {self.best_of}, which needs stream to be false", "best_of")


Body = TypeVar("Body", bound=RequestBody)


def parse(model: type[Body], body: bytes, limits: LimitsConfig) -> Body:
    """Returns the checked request; raises HttpError (malformed JSON) or InvalidRequest (a field)."""
    check_size(body)
    request = _checked(model.model_validate_json, body, limits)
    check_json(body)
    return request


def parse_value(model: type[Body], body: Mapping[str, Any], limits: LimitsConfig) -> Body:
    """The same for what is JSON no more."""
    return _checked(model.model_validate, body, limits)


def _checked(validate: Callable[[Any], Body], body: Any, limits: LimitsConfig) -> Body:
    try:
        request = validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise HttpError(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from None
        raise InvalidRequest(*_described(first["loc"], first["msg"], first.get("input"))) from None
    request.check(limits)
    return request


def read_prompts(value: Any, most: int, field: str = "prompt") -> list[Prompt]:
    """Returns the prompts from one text, texts, token ids, or lists of token ids; InvalidRequest names the place of an
    invalid one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        what = "missing" if value is None else f"a {type(value).__name__}"
        raise InvalidRequest(f"{field} is {what}, must be a string, a list of strings, or token ids", field)
    if not value:
        raise InvalidRequest(f"{field} is an empty list, must hold at least one {field}", field)
    if not isinstance(value[0], (str, list)):
        return [_token_ids(field, value, field)]
    if len(value) > most:
        raise InvalidRequest(f"{field} holds {len(value)} {field}s, at most {most} a request", field)
    kind = type(value[0])
    for i, item in enumerate(value):
        if not isinstance(item, kind):
            raise InvalidRequest(f"{field}[{i}] is {_short(item)}, the {field}s before it are of another kind", field)
    return value if kind is str else [_token_ids(f"{field}[{i}]", item, field) for i, item in enumerate(value)]


def _token_ids(place: str, values: list[Any], field: str) -> list[int]:
    if set(map(type, values)) == {int}:  # millions are seen through without holding up the event loop
        return values
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{place}[{i}] is {_short(value)}, must be a token id", field)
    return values


def _bias_id(key: str) -> int:
    """Returns the token id of a key of `logit_bias`: JSON's keys are text."""
    if not (key.isascii() and key.isdecimal() and len(key) < 11):
        raise InvalidRequest(f"logit_bias has the key {_short(key)}, must be a token id", "logit_bias")
    return int(key)


def _described(location: tuple[int | str, ...], problem: str, value: Any) -> tuple[str, str]:
    """A message in one line and the name of the field. A union's arms follow the field in pydantic's locations."""
    field = str(location[0]) if location else "body"
    inner = "".join(f"[{part}]" for part in location[1:] if isinstance(part, int))
    named = [part for part in location[1:] if isinstance(part, str) and part in StreamOptions.model_fields]
    path = field + "".join(f".{part}" for part in named) + inner
    return f"{path} is {_short(value)}: {problem[:1].lower()}{problem[1:]}", field


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
