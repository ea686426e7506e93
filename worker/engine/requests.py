"""OpenRequests: from the step loop's outcomes to the queues that callers read, within one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from allspan.protos.api.errors import AllspanError, AlreadyExists
from allspan.protos.api.results import Output, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text.stream.text_stream import TextStream
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.worker.scheduler.scheduler import Outcome


@dataclass(slots=True)
class _Open:
    queue: ResultQueue
    stream: TextStream | None
    """Watches for stop strings; None: there are none."""
    has_stopped: bool = False


class OpenRequests:
    """Queues by request id, until their requests end or are released. Thread-safe."""

    def __init__(self, cancel: Callable[[Iterable[bytes]], None]) -> None:
        """`cancel` ends requests in the engine."""
        self._cancel = cancel
        self._lock = threading.Lock()
        self._open: dict[bytes, _Open] = {}

    def add(self, request_id: bytes, params: SamplingParams, tokenizer: Tokenizer | None) -> ResultQueue:
        """Raises AlreadyExists; InvalidRequest for stop strings without a tokenizer."""
        entry = _Open(ResultQueue(), TextStream(tokenizer, params) if params.stop else None)
        with self._lock:
            if request_id in self._open:
                raise AlreadyExists(f"request_id {request_id.hex()} is in use; release that request first")
            self._open[request_id] = entry
        return entry.queue

    def queue(self, request_id: bytes) -> ResultQueue | None:
        with self._lock:
            entry = self._open.get(request_id)
        return None if entry is None else entry.queue

    def queues(self) -> list[ResultQueue]:
        with self._lock:
            return [entry.queue for entry in self._open.values()]

    def remove(self, request_id: bytes) -> ResultQueue | None:
        with self._lock:
            entry = self._open.pop(request_id, None)
        return None if entry is None else entry.queue

    def deliver(self, outcomes: list[Outcome]) -> None:
        """The step loop's callback. A request that meets one of its stop strings is ended in the engine."""
        stopped = []
        for request, outcome in outcomes:
            with self._lock:
                entry = self._open.get(request.request_id)
            if entry is None:
                continue
            if isinstance(outcome, AllspanError):
                entry.queue.fail(outcome)
            elif entry.stream is None:
                entry.queue.put(outcome)
            elif self._put_until_stop(entry, entry.stream, outcome):
                stopped.append(request.request_id)
            if entry.queue.state.is_final:
                self.remove(request.request_id)
        if stopped:
            self._cancel(stopped)

    @staticmethod
    def _put_until_stop(entry: _Open, stream: TextStream, output: Output) -> bool:
        """True: a stop string has just ended the text. The engine's own end, a step later, brings the timings."""
        if entry.has_stopped:
            if output.finish_reason:
                entry.queue.put(Output(finish_reason="stop", timings=output.timings))
            return False
        delta = stream.push(output)
        kept = replace(output, token_ids=delta.token_ids, logprobs=delta.logprobs)
        if not delta.stopped_early:
            entry.queue.put(replace(kept, finish_reason=delta.finish_reason))
            return False
        entry.has_stopped = True
        entry.queue.put(kept)
        return True
