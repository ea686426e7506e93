"""The output of a request for its caller: one stream of tokens, however many attempts made them."""

from __future__ import annotations

from dataclasses import replace

from allspan.protos.api.results import Output, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo


class RequestOutput:
    """The tokens of a request so far, and the queue that its caller reads them from.

    An attempt after the first one begins where the earlier ones ended, but counts its time from its own start and sends
    prompt log-probabilities from the first one on. `begin_attempt` says what the earlier attempts have brought.
    """

    def __init__(self, prompt_len: int) -> None:
        self.queue = ResultQueue()
        self.token_ids: list[int] = []
        self._prompt_len = prompt_len
        self._is_resumed = False
        self._earlier_s = 0.0
        self._num_earlier = 0
        self._first_token: RequestTimings | None = None
        self._num_prompt_logprobs = 0
        self._num_repeated = 0

    @property
    def is_prefilling(self) -> bool:
        """True until the present attempt has brought a token."""
        return len(self.token_ids) == self._num_earlier

    @property
    def num_computed_before(self) -> int:
        """Number of tokens that the present attempt has to compute before its first new one."""
        return self._prompt_len + self._num_earlier

    @property
    def has_prompt_logprobs(self) -> bool:
        """True once all prompt log-probabilities have come, if any were requested."""
        return bool(self.token_ids) or 0 < self._num_prompt_logprobs >= self._prompt_len - 1

    def begin_attempt(self, is_resumed: bool, elapsed_s: float) -> None:
        """The outputs added from now on are those of another attempt, `elapsed_s` after the request arrived."""
        self._is_resumed = is_resumed
        self._earlier_s = elapsed_s if is_resumed else 0.0
        self._num_earlier = len(self.token_ids)
        self._num_repeated = self._num_prompt_logprobs

    def add(self, output: Output) -> None:
        """Puts an output of the present attempt into the queue, as if one world had done everything."""
        self.token_ids.extend(output.token_ids)
        if output.prompt_logprobs:
            output = replace(output, prompt_logprobs=self._new_prompt_logprobs(output))
        if output.timings is not None:
            output = replace(output, timings=self._timings(output, output.timings))
        self.queue.put(output)

    def cancel(self) -> None:
        """Ends it for its reader. Ignored after its end."""
        self.queue.put(Output(finish_reason="cancelled"))

    def finish(self, params: SamplingParams, info: ClusterInfo, elapsed_s: float) -> bool:
        """Ends it if its last token has been delivered, so that only the message about its end can have been lost;
        returns whether it has."""
        reason, stop = _finish_reason(self.token_ids, params, info, self._prompt_len)
        if reason:
            first = self._first_token or RequestTimings(prompt_tokens=self._prompt_len)
            timings = replace(first, total_s=elapsed_s, output_tokens=len(self.token_ids))
            self.queue.put(Output(finish_reason=reason, stop_token_id=stop, timings=timings))
        return bool(reason)

    def _new_prompt_logprobs(self, output: Output) -> tuple[TokenLogprob, ...]:
        """Returns the prompt log-probabilities without those that an earlier attempt has brought."""
        known = min(self._num_repeated, len(output.prompt_logprobs))
        self._num_repeated -= known
        self._num_prompt_logprobs += len(output.prompt_logprobs) - known
        return output.prompt_logprobs[known:]

    def _timings(self, output: Output, timings: RequestTimings) -> RequestTimings | None:
        """Counts from the first arrival on; the first token is reported once."""
        first, earlier = self._first_token, self._earlier_s
        if not self._is_resumed:
            seen = timings
        elif first is None:
            seen = replace(
                timings,
                queue_s=earlier + timings.queue_s,
                ttft_s=earlier + timings.ttft_s if timings.ttft_s else 0.0,
                total_s=earlier + timings.total_s,
                arrived_at=timings.arrived_at - earlier,
            )
        elif output.finish_reason:
            preemptions = first.preemptions + timings.preemptions
            tokens = len(self.token_ids)
            seen = replace(first, total_s=earlier + timings.total_s, output_tokens=tokens, preemptions=preemptions)
        else:
            return None
        if output.token_ids and first is None:
            self._first_token = seen
        return seen


def _finish_reason(
    tokens: list[int], params: SamplingParams, info: ClusterInfo, prompt_len: int
) -> tuple[str, int | None]:
    """Returns the finish reason of a request with these output tokens, and its stop token; "" while it is not
    finished."""
    if not tokens:
        return "", None
    last = tokens[-1]
    if last in params.stop_token_ids or (last in info.eos_token_ids and not params.ignore_eos):
        return "stop", last
    if any(tuple(tokens[-len(ids) :]) == ids for ids in params.stop_words_ids) and len(tokens) >= params.min_tokens:
        return "stop", None
    most = min(params.max_tokens, info.max_model_len - prompt_len)
    return ("length" if len(tokens) >= most else ""), None
