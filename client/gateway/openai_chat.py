"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from allspan.client.gateway.generation import Generation
from allspan.client.gateway.openai_shapes import Gathered, Json, Plan, TokenTexts
from allspan.client.gateway.schemas import ChatRequest, parse, read_messages
from allspan.client.gateway.submit import Job, Submitter, spread
from allspan.protos.errors import InvalidRequest
from allspan.protos.results import TokenLogprob
from allspan.protos.sampling import MAX_LOGPROBS
from allspan.protos.text.stream import TextDelta


async def plan_chat(submitter: Submitter, body: bytes) -> Plan:
    """Checks everything; nothing runs yet."""
    request = parse(ChatRequest, body, submitter.limits)
    submitter.check_model(request.model)
    messages = read_messages(request.messages)
    fields = submitter.sampling(sampling_fields(request))
    options = request.options()
    token_ids = await submitter.encode_chat(messages, request.prompt_options())
    params = submitter.params(fields, len(token_ids), default_max_tokens=None)
    texts = TokenTexts(submitter.tokenizer, bool(request.return_tokens_as_token_ids))
    shape = ChatShape(texts, params.logprobs is not None, params.prompt_logprobs is not None)
    job = Job(token_ids, params, continues=False, options=options, text=request.text_options())
    jobs = spread(job, request.choices)
    return Plan(jobs, shape, request.choices, bool(request.stream), request.include_usage)


def sampling_fields(request: ChatRequest) -> dict[str, Any]:
    """Fields of `SamplingParams`, with this endpoint's names for them."""
    fields = request.sampling()
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                f"max_completion_tokens is {request.max_completion_tokens}, max_tokens {request.max_tokens}: give one",
                "max_completion_tokens",
            )
        fields["max_tokens"] = request.max_completion_tokens
    if request.logprobs:
        if not 0 <= (top := request.top_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs is {top}, must be from 0 to {MAX_LOGPROBS}", "top_logprobs")
        fields["logprobs"] = top
    elif request.top_logprobs:
        raise InvalidRequest(f"top_logprobs is {request.top_logprobs}, which needs logprobs to be true", "top_logprobs")
    return fields


class ChatShape:
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, with_logprobs: bool, with_prompt_logprobs: bool) -> None:
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs

    def opening(self, index: int, generation: Generation) -> list[Json]:
        return [self._piece(index, {"role": "assistant", "content": "", "refusal": None})]

    def pieces(self, index: int, delta: TextDelta) -> list[Json]:
        pieces = []
        if delta.text or (self._with_logprobs and delta.logprobs):
            logprobs = self._logprobs(delta.token_ids, delta.logprobs)
            pieces.append(self._piece(index, {"content": delta.text}, logprobs))
        if delta.finished:
            pieces.append(self._piece(index, {}, finish_reason=delta.finish_reason))
        return pieces

    def choice(self, index: int, gathered: Gathered) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(gathered.texts), "refusal": None, "annotations": []},
            "logprobs": self._logprobs(gathered.token_ids, gathered.logprobs),
            "finish_reason": gathered.finish_reason,
        }

    def extras(self, gathered: Sequence[Gathered]) -> Json:
        if not self._with_prompt_logprobs:
            return {}
        return {"prompt_logprobs": self._texts.of_prompt(gathered[0].prompt_logprobs)}

    def _piece(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob]) -> Json | None:
        if not self._with_logprobs:
            return None
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            top = [self._token(top_id, logprob) for top_id, logprob in entry.top]
            content.append(self._token(token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        piece = self._texts.piece(token_id)
        return {"token": self._texts.text(token_id), "logprob": logprob, "bytes": list(piece)}
