"""Answers of Generate: tokens as they come in chunks, and a last message for each choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from allspan.client.gateway.admission.active_request import ActiveRequest, PromptLogprob
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.results import TokenLogprob
from allspan.protos.text.stream.text_stream import TextDelta


class ChoiceAnswer:
    """The messages of one choice. `prompt`: its token ids; `stop_ids`: the tokens that the request called ends."""

    def __init__(
        self, index: int, generation: ActiveRequest, prompt: Sequence[int], stop_ids: Sequence[int], streams: bool
    ) -> None:
        self._index = index
        self._generation = generation
        self._prompt = prompt
        self._stop_ids = stop_ids
        self._streams = streams
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._is_first = True

    def add(self, delta: TextDelta) -> Iterator[pb.GenerateResponse]:
        """Yields what is to be sent now. The prompt's log-probabilities, which may come in parts, wait for the first
        token."""
        self._ids += delta.token_ids
        if self._streams:
            if delta.token_ids:
                yield pb.GenerateResponse(chunk=self._chunk(delta))
        else:
            self._logprobs += delta.logprobs
        if delta.finished:
            yield self.end(delta.finish_reason, delta.stop)

    def end(self, finish_reason: str, stop: str | int | None = None) -> pb.GenerateResponse:
        """Returns the last message."""
        complete = pb.GenerateComplete(
            output_ids=self._ids,
            finish_reason=finish_reason,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(self._ids),
            cached_tokens=self._generation.num_cached_tokens,
            output_logprobs=_output_logprobs(self._ids, self._logprobs),
            input_logprobs=_input_logprobs(self._prompt, self._generation.prompt_logprobs),
            index=self._index,
        )
        if isinstance(stop, str):
            complete.matched_stop_str = stop
        elif stop is not None and stop in self._stop_ids:  # the model's own end is no match
            complete.matched_token_id = stop
        return pb.GenerateResponse(complete=complete)

    def _chunk(self, delta: TextDelta) -> pb.GenerateStreamChunk:
        known = self._generation.prompt_logprobs if self._is_first else []
        self._is_first = False
        return pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(delta.token_ids),
            cached_tokens=self._generation.num_cached_tokens,
            output_logprobs=_output_logprobs(delta.token_ids, delta.logprobs),
            input_logprobs=_input_logprobs(self._prompt, known),
            index=self._index,
        )


def _output_logprobs(ids: Sequence[int], entries: Sequence[TokenLogprob]) -> pb.OutputLogProbs | None:
    if not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=ids[: len(entries)],
        top_logprobs=_tops(entries),
    )


def _input_logprobs(prompt: Sequence[int], entries: Sequence[PromptLogprob]) -> pb.InputLogProbs | None:
    """Returns None where none were asked for, as they come only then; the first token has none."""
    if not entries:
        return None
    values = [pb.InputTokenLogProb(value=entry.logprob) for _, entry in entries]
    tops = _tops([entry for _, entry in entries])
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *values],
        token_ids=[prompt[0], *(token_id for token_id, _ in entries)],
        top_logprobs=[pb.TopLogProbs(), *tops] if tops else [],
    )


def _tops(entries: Iterable[TokenLogprob]) -> list[pb.TopLogProbs]:
    """Returns the most likely tokens of each place; none at all where none were asked for."""
    tops = [
        pb.TopLogProbs(values=[value for _, value in entry.top], token_ids=[token_id for token_id, _ in entry.top])
        for entry in entries
    ]
    return tops if any(top.token_ids for top in tops) else []
