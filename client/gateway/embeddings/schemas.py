"""The requests for embeddings, scores and reranking as pydantic models."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.embeddings.embed import EmbedCall
from allspan.client.gateway.openai.schemas import RequestBody, read_prompts
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.embeddings.calls import text_pairs

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "pattern": "^[^\\x00]*$"}
_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_INPUTS: dict[str, Any] = {
    "anyOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "items": _TEXT},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}
"""One input or many, for the OpenAPI document."""
_OR_NULL: dict[str, Any] = {"anyOf": [*_INPUTS["anyOf"], {"type": "null"}]}
_OPTIONS = ("priority", "timeout_s", "prefix_cache", "cache_salt")


class PooledRequest(RequestBody):
    """The fields that all of them share."""

    priority: int | None = None
    timeout_s: float | None = None
    prefix_cache: bool | None = None
    cache_salt: str | None = None

    def options(self) -> RequestOptions:
        """Returns the request's options; InvalidRequest names the field."""
        return RequestOptions(**{name: value for name in _OPTIONS if (value := getattr(self, name)) is not None})


class EmbeddingRequest(PooledRequest):
    """POST /v1/embeddings."""

    input: Any = Field(None, json_schema_extra=_INPUTS)
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    input_type: str | None = None
    prompt_name: str | None = None  # sentence-transformers' name of input_type
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None

    def check(self, limits: LimitsConfig) -> None:
        super().check(limits)
        if self.encoding_format not in (None, "float", "base64"):
            raise InvalidRequest(
                f"encoding_format is {self.encoding_format[:64]!r}, must be float or base64", "encoding_format"
            )

    def call(self, limits: LimitsConfig) -> EmbedCall:
        """Returns the call; InvalidRequest names the field."""
        return EmbedCall(
            inputs=read_prompts(self.input, limits.max_embedding_inputs, "input"),
            dimensions=self.dimensions,
            normalize=self.normalize,
            input_type=self.prompt_name if self.input_type is None else self.input_type,
            reading=PromptOptions(self.add_special_tokens, last_tokens=self.truncate_prompt_tokens),
            options=self.options(),
        )


class OllamaEmbedRequest(RequestBody):
    """POST /api/embed."""

    input: Any = Field(None, json_schema_extra=_INPUTS)
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None

    def call(self, limits: LimitsConfig) -> EmbedCall:
        """Returns the call, whose vectors have length 1; InvalidRequest names the field."""
        return EmbedCall(
            inputs=read_prompts(self.input, limits.max_embedding_inputs, "input"),
            dimensions=self.dimensions,
            normalize=True,
            reading=PromptOptions(last_tokens=None if self.truncate is False else -1),
        )


class OllamaPromptRequest(RequestBody):
    """POST /api/embeddings, the older one: a single text, whose vector is not normalised."""

    prompt: str = Field("", json_schema_extra={"title": "Prompt"})
    options: dict[str, Any] | None = None
    keep_alive: Any = None

    def call(self) -> EmbedCall:
        """Returns the call."""
        return EmbedCall([self.prompt], "prompt", normalize=False, reading=PromptOptions(last_tokens=-1))


class LlamaEmbedRequest(RequestBody):
    """llama-server's POST /embedding. `embd_normalize` is 2 for vectors of length 1, negative for none."""

    content: Any = Field(None, json_schema_extra=_OR_NULL)
    input: Any = Field(None, json_schema_extra=_OR_NULL)
    embd_normalize: int | None = None

    def call(self, limits: LimitsConfig) -> EmbedCall:
        """Returns the call; InvalidRequest names the field."""
        field = "content" if self.input is None else "input"
        if self.embd_normalize not in (None, -1, 2):
            raise InvalidRequest(f"embd_normalize is {self.embd_normalize}, must be 2 or -1", "embd_normalize")
        given = self.content if self.input is None else self.input
        normalize = None if self.embd_normalize is None else self.embd_normalize == 2
        return EmbedCall(read_prompts(given, limits.max_embedding_inputs, field), field, normalize=normalize)


class ScoreRequest(PooledRequest):
    """POST /v1/score, in vLLM's shapes: text_1 and text_2, or queries and documents."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    instruction: str | None = None

    def pairs(self, limits: LimitsConfig) -> list[tuple[str, str]]:
        """Returns each document with its query."""
        names = ("text_1", "text_2") if self.text_1 is not None or self.text_2 is not None else ("queries", "documents")
        return text_pairs(*(_texts(getattr(self, name), name, limits) for name in names))


class RerankRequest(PooledRequest):
    """POST /v1/rerank, in Cohere's and Jina's shapes: a text may also be {"text": ...}."""

    query: Any = None
    documents: Any = None
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    def check(self, limits: LimitsConfig) -> None:
        super().check(limits)
        if self.top_n is not None and self.top_n < 1:
            raise InvalidRequest(f"top_n is {self.top_n}, must be at least 1", "top_n")

    def pairs(self, limits: LimitsConfig) -> list[tuple[str, str]]:
        """Returns each document with the query."""
        query = _texts(self.query, "query", limits)
        if len(query) != 1:
            raise InvalidRequest(f"query holds {len(query)} texts, must be one", "query")
        return text_pairs(query, _texts(self.documents, "documents", limits))


def _texts(value: Any, field: str, limits: LimitsConfig) -> list[str]:
    """Returns one text or many as a list. InvalidRequest names the place of what is none."""
    given = value if isinstance(value, list) else [value]
    if not 1 <= len(given) <= limits.max_embedding_inputs:
        raise InvalidRequest(
            f"{field} holds {len(given)} texts, must have from 1 to {limits.max_embedding_inputs}", field
        )
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in given]
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            where = f"{field}[{place}]" if isinstance(value, list) else field
            raise InvalidRequest(f"{where} is {given[place]!r:.64}, must be text of at least one character", field)
    return texts
