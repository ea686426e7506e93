"""Builds a `Completion` from a request's outputs as they come; shared by both engines' `generate`."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.protos.api.engine import Completion
from allspan.protos.api.results import Output, RequestTimings, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text.stream.text_stream import TextStream
from allspan.protos.text.tokenizers.tokenizer import Tokenizer


class CompletionBuilder:
    """`add` the outputs in order until `is_finished` (or the queue's end), then `build`."""

    def __init__(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        """Starts an empty completion. Without a tokenizer the text stays empty."""
        self._request_id = request_id
        self._prompt = tuple(prompt)
        self._stream = TextStream(tokenizer, params)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._timings = RequestTimings()
        self._finish_reason = ""
        self._vector = b""

    @property
    def is_finished(self) -> bool:
        return bool(self._finish_reason)

    def add(self, output: Output) -> None:
        self._timings = output.timings or self._timings
        self._prompt_logprobs.extend(output.prompt_logprobs)
        self._vector = self._vector or output.vector
        delta = self._stream.push(output)
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._finish_reason = self._finish_reason or delta.finish_reason

    def build(self) -> Completion:
        timings = self._timings
        return Completion(
            request_id=self._request_id,
            prompt_token_ids=self._prompt,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            finish_reason=self._finish_reason,
            logprobs=tuple(self._logprobs),
            cached_tokens=timings.cached_tokens,
            queue_s=timings.queue_s,
            ttft_s=timings.ttft_s,
            total_s=timings.total_s,
            prompt_logprobs=tuple(self._prompt_logprobs),
            timings=timings,
            vector=self._vector,
        )
