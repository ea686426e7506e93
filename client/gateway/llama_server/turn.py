"""One answer of /completion from its first event to its last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.errors import body_of
from allspan.client.gateway.http.sse import event
from allspan.client.gateway.llama_server.request import LlamaRequest
from allspan.client.gateway.openai.completions import completion_plan
from allspan.client.gateway.openai.schemas import CompletionRequest, parse, parse_value
from allspan.client.gateway.openai.shapes import TokenTexts
from allspan.protos.api.errors import AllspanError
from allspan.protos.api.results import RequestTimings, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text.stream.text_stream import TextDelta

Json = dict[str, Any]


@dataclass
class LlamaTurn:
    """A checked request and its answer as far as it has come (see `http.turns.Turn`)."""

    job: Job
    request: LlamaRequest
    texts: TokenTexts
    model: str
    is_streamed: bool
    media_type: str = "text/event-stream"
    _content: list[str] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _probabilities: list[Json] = field(default_factory=list)
    _end: Json = field(default_factory=dict)

    def begin(self, generation: ActiveRequest) -> Iterator[bytes]:
        yield from ()

    def push(self, delta: TextDelta, generation: ActiveRequest) -> Iterator[bytes]:
        shown = list(self._shown(delta.token_ids, delta.logprobs)) if self.request.n_probs else []
        self._content.append(delta.text)
        self._tokens += delta.token_ids
        self._probabilities += shown
        if delta.text or shown:
            yield event(self._fields(delta.text, delta.token_ids, shown, generation) | {"stop": False})
        if delta.finished:
            self._end = self._ended(delta, generation)
            yield event(self._fields("", (), (), generation) | self._end)

    def fail(self, error: AllspanError) -> Iterator[bytes]:
        yield event(body_of(error))

    def whole(self, generation: ActiveRequest) -> Json:
        return self._fields("".join(self._content), self._tokens, self._probabilities, generation) | self._end

    def _fields(self, text: str, tokens: Iterable[int], shown: Iterable[Json], generation: ActiveRequest) -> Json:
        fields: Json = {
            "index": 0,
            "content": text,
            "tokens": list(tokens) if self.request.return_tokens else [],
            "id_slot": -1,
            "tokens_predicted": generation.num_output_tokens,
            "tokens_evaluated": generation.num_prompt_tokens,
        }
        return fields | ({"completion_probabilities": list(shown)} if self.request.n_probs else {})

    def _ended(self, delta: TextDelta, generation: ActiveRequest) -> Json:
        kind = "limit" if delta.finish_reason == "length" else "word" if isinstance(delta.stop, str) else "eos"
        return {
            "stop": True,
            "stop_type": kind,
            "stopping_word": delta.stop if kind == "word" else "",
            "model": self.model,
            "prompt": self.request.prompt,
            "has_new_line": any("\n" in text for text in self._content),
            "truncated": False,
            "tokens_cached": generation.num_cached_tokens,
            "generation_settings": settings(self.job.params),
            "timings": _timings(generation.timings, generation),
        }

    def _shown(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob]) -> Iterator[Json]:
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            top = [self._token(top_id, logprob) for top_id, logprob in entry.top]
            yield self._token(token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        piece = self.texts.piece(token_id)
        return {"id": token_id, "token": self.texts.text(token_id), "bytes": list(piece), "logprob": logprob}


async def plan_completion(context: GatewayContext, body: bytes) -> LlamaTurn:
    """Checks everything; nothing runs yet."""
    limits = context.config.limits
    request = parse(LlamaRequest, body, limits)
    context.model.check_name(request.model)
    completion = parse_value(CompletionRequest, request.completion(), limits)
    plan = await completion_plan(context, completion, request.most_tokens)
    name = context.model.answered(plan.jobs[0].options)
    return LlamaTurn(plan.jobs[0], request, TokenTexts(context.tokenizer), name, bool(request.stream))


def settings(params: SamplingParams) -> Json:
    """Returns the sampling parameters under llama-server's names."""
    same = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "presence_penalty",
        "frequency_penalty",
        "ignore_eos",
    )
    return {name: getattr(params, name) for name in same} | {
        "repeat_penalty": params.repetition_penalty,
        "n_predict": params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "stop": list(params.stop),
    }


def _timings(timings: RequestTimings, generation: ActiveRequest) -> Json:
    prompt_ms = 1e3 * max(0.0, timings.ttft_s - timings.queue_s)
    output_ms = 1e3 * max(0.0, timings.total_s - timings.ttft_s)
    cached = generation.num_cached_tokens
    return {
        "cache_n": cached,
        **_rate("prompt", generation.num_prompt_tokens - cached, prompt_ms),
        **_rate("predicted", generation.num_output_tokens, output_ms),
    }


def _rate(name: str, count: int, ms: float) -> Json:
    return {
        f"{name}_n": count,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / count if count > 0 else 0.0,
        f"{name}_per_second": 1e3 * count / ms if ms else 0.0,
    }
