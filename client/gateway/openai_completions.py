"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.client.gateway.openai_shapes import Gathered, Json, Plan, TokenTexts
from allspan.client.gateway.schemas import CompletionRequest, parse, read_prompts
from allspan.client.gateway.submit import Job, Submitter, spread
from allspan.protos.results import TokenLogprob
from allspan.protos.text.stream import TextDelta

DEFAULT_MAX_TOKENS = 16


async def plan_completion(submitter: Submitter, body: bytes) -> Plan:
    """Checks everything; nothing runs yet."""
    request = parse(CompletionRequest, body)
    submitter.check_model(request.model)
    prompts = read_prompts(request.prompt)
    fields = submitter.sampling(request.sampling())
    if request.logprobs is not None:
        fields["logprobs"] = request.logprobs
    options = request.options()
    jobs: list[Job] = []
    for i, prompt in enumerate(prompts):
        token_ids = await submitter.encode(prompt, "prompt" if len(prompts) == 1 else f"prompt[{i}]")
        params = submitter.params(fields, len(token_ids), DEFAULT_MAX_TOKENS)
        jobs += spread(Job(token_ids, params, options=options), request.choices)
    shape = CompletionShape(
        TokenTexts(submitter.tokenizer), request.logprobs is not None, request.prompt_logprobs is not None
    )
    return Plan(jobs, shape, request.choices, bool(request.stream), request.include_usage)


class CompletionShape:
    """text_completion, whole and as chunks."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, texts: TokenTexts, with_logprobs: bool, with_prompt_logprobs: bool) -> None:
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> list[Json]:
        return []

    def pieces(self, index: int, delta: TextDelta) -> list[Json]:
        if not (delta.text or delta.finished or (self._with_logprobs and delta.logprobs)):
            return []
        logprobs = self._logprobs(index, delta.token_ids, delta.logprobs)
        return [self._choice(index, delta.text, logprobs, delta.finish_reason or None)]

    def choice(self, index: int, gathered: Gathered) -> Json:
        logprobs = self._logprobs(index, gathered.token_ids, gathered.logprobs)
        choice = self._choice(index, "".join(gathered.texts), logprobs, gathered.finish_reason)
        if self._with_prompt_logprobs:
            choice["prompt_logprobs"] = self._texts.of_prompt(gathered.prompt_logprobs)
        return choice

    def extras(self, gathered: Sequence[Gathered]) -> Json:
        return {}

    def _choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json | None:
        """Offsets count the tokens' own characters, from the start of this choice's text."""
        if not self._with_logprobs:
            return None
        tokens = [self._texts.text(token_id) for token_id in token_ids]
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [self._top(token, entry) for token, entry in zip(tokens, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: str, entry: TokenLogprob) -> dict[str, float]:
        """The chosen token is always among them; tokens with the same text share the better value."""
        top = {token: entry.logprob}
        for token_id, logprob in reversed(entry.top):
            top[self._texts.text(token_id)] = logprob
        return top
