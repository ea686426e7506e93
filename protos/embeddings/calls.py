"""`embed`, `score` and `rerank` of every engine, made of its `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from allspan.protos.api.engine import Completion, Prompt
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.prompts import Params, checked_options, prompt_list
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.embeddings.card import EmbeddingCard
from allspan.protos.embeddings.rerank import check_pair
from allspan.protos.embeddings.vectors import Floats, cosine, embedding, probability, ranked
from allspan.protos.model_files.json_values import shown
from allspan.protos.text.tokenizers.tokenizer import Tokenizer

NOTHING_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0)
"""The parameters of a request whose result is a vector."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place in the list that was given, and its relevance."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class _Embed:
    """A call of `embed`, checked."""

    prompts: list[Prompt]
    options: RequestOptions
    dimensions: int | None
    normalize: bool

    def vectors(self, completions: Sequence[Completion]) -> Floats:
        made = [embedding(each.vector, self.dimensions, self.normalize) for each in completions]
        return np.stack(made)


@dataclass(frozen=True, slots=True)
class _Score:
    """A call of `score`: what is run, and which two results (or which one) a score is made of."""

    prompts: list[Prompt]
    options: RequestOptions
    pairs: list[tuple[int, int]]

    def scores(self, completions: Sequence[Completion]) -> Floats:
        if self.options.pooling == "score":
            return np.asarray([probability(each.vector) for each in completions], dtype=np.float32)
        vectors = [embedding(each.vector) for each in completions]
        return np.asarray([cosine(vectors[a], vectors[b]) for a, b in self.pairs], dtype=np.float32)


class EmbeddingCalls:
    """The methods, for an engine that derives from this and has the first four."""

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    @property
    def embedding_card(self) -> EmbeddingCard:
        """What the model's files say of its embeddings and scores. Read at first use; CheckpointError."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        raise NotImplementedError

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None = None,
        normalize: bool | None = None,
        input_type: str | None = None,
        options: RequestOptions | None = None,
    ) -> Floats:
        """float32 [prompts, dimensions]: a vector for each text (or list of token ids); they run together.

        `dimensions` cuts vectors of models that were trained for it, before they are normalised. `normalize` None: as
        the model says. `input_type`: the name of a prompt that the model wants before the texts ("query").
        `options.pooling` overrides the model's pooling.
        """
        call = self._embed_call(prompts, dimensions, normalize, input_type, options)
        return call.vectors(self.generate(call.prompts, NOTHING_SAMPLED, call.options))

    async def aembed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None = None,
        normalize: bool | None = None,
        input_type: str | None = None,
        options: RequestOptions | None = None,
    ) -> Floats:
        """`embed` for asyncio; cancelling it stops its requests."""
        call = await asyncio.to_thread(self._embed_call, prompts, dimensions, normalize, input_type, options)
        return call.vectors(await self.agenerate(call.prompts, NOTHING_SAMPLED, call.options))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None = None,
        options: RequestOptions | None = None,
    ) -> Floats:
        """float32 [documents]: how well each document fits its query. One query goes with every document. A reranker
        gives probabilities, other models the cosine of the two vectors. `instruction`: what a reranker judges by."""
        call = self._score_call(queries, documents, instruction, options)
        return call.scores(self.generate(call.prompts, NOTHING_SAMPLED, call.options))

    async def ascore(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None = None,
        options: RequestOptions | None = None,
    ) -> Floats:
        """`score` for asyncio; cancelling it stops its requests."""
        call = await asyncio.to_thread(self._score_call, queries, documents, instruction, options)
        return call.scores(await self.agenerate(call.prompts, NOTHING_SAMPLED, call.options))

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, instruction: str | None = None
    ) -> list[Ranked]:
        """The `top_n` documents (None: all) that fit the query best, the best first."""
        scores = self.score(query, texts_of(documents, "documents"), instruction)
        return [Ranked(*each) for each in ranked(scores.tolist(), _checked_top(top_n))]

    async def arerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, instruction: str | None = None
    ) -> list[Ranked]:
        """`rerank` for asyncio; cancelling it stops its requests."""
        scores = await self.ascore(query, texts_of(documents, "documents"), instruction)
        return [Ranked(*each) for each in ranked(scores.tolist(), _checked_top(top_n))]

    def _embed_call(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None,
        normalize: bool | None,
        input_type: str | None,
        options: RequestOptions | None,
    ) -> _Embed:
        card, options, listed = self.embedding_card, checked_options(options), prompt_list(prompts)
        if not listed:
            raise InvalidRequest("prompts is empty, must have at least one text", "prompts")
        card.check_dimensions(dimensions)
        before = card.prompt(input_type)
        if before:
            listed = [before + each if isinstance(each, str) else each for each in listed]
        options = replace(options, pooling=options.pooling or card.pooling)
        return _Embed(listed, options, dimensions, card.normalize if normalize is None else normalize)

    def _score_call(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None,
        options: RequestOptions | None,
    ) -> _Score:
        pairs = text_pairs(queries, documents)
        card, options = self.embedding_card, checked_options(options)
        if card.head is not None:
            texts = [card.head.prompt(query, document, instruction) for query, document in pairs]
            ids: list[Prompt] = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
            return _Score(ids, replace(options, pooling="score"), [])
        if instruction is not None:
            raise InvalidRequest("instruction is given, the model is no reranker: leave it out", "instruction")
        texts_of = [(card.prompt("query") + query, card.prompt("document") + text) for query, text in pairs]
        found: dict[str, int] = {}
        places = [tuple(found.setdefault(text, len(found)) for text in pair) for pair in texts_of]
        return _Score(list(found), replace(options, pooling=card.pooling), [(a, b) for a, b in places])


def text_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Each document with its query; one query goes with every document. Raises InvalidRequest."""
    asked, texts = texts_of(queries, "queries"), texts_of(documents, "documents")
    if not texts or not asked:
        raise InvalidRequest("documents is empty, must have at least one text", "documents")
    if len(asked) == 1:
        asked *= len(texts)
    if len(asked) != len(texts):
        raise InvalidRequest(
            f"queries has {len(asked)} entries for {len(texts)} documents, must have one, or one for each", "queries"
        )
    pairs = list(zip(asked, texts, strict=True))
    for query, document in pairs:
        check_pair(query, document)
    return pairs


def texts_of(given: object, name: str) -> list[str]:
    """A text, or a sequence of texts, as a list. Raises InvalidRequest naming `name` for anything else."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequest(f"{name} is {shown(given)}, must be a text or a list of texts", name)
    return list(given)


def _checked_top(top_n: int | None) -> int | None:
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise InvalidRequest(f"top_n is {top_n!r}, must be a number from 1 on", "top_n")
    return top_n
