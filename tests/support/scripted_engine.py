"""An engine that answers by what the prompt asks for, in steps of several tokens, each read before the next comes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allspan.protos.api.engine import Prompt
from allspan.protos.api.errors import AllspanError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output, RequestHandle, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from support.fake_engine import Asked, FakeEngine, prompt_logprob

Script = Sequence[str | AllspanError] | AllspanError
"""Texts, one a step; an error in their place ends the request, one instead of them refuses it."""


@dataclass
class ScriptedEngine(FakeEngine):
    """Tokens are bytes."""

    scripts: Mapping[str, Script] = field(default_factory=dict)
    """By a mark that the prompt holds; the last one counts."""

    async def astart_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        script = self._script(prompt)
        if isinstance(script, AllspanError):
            raise script
        return await super().astart_request(prompt, sampling_params, request_id, options)

    def _script(self, prompt: Prompt) -> Script:
        assert not isinstance(prompt, str)
        text = bytes(token for token in prompt if token < 256).decode()
        marks = [mark for mark in self.scripts if mark in text]
        assert marks, f"no script for {text!r}"
        return self.scripts[max(marks, key=text.rfind)]

    async def _run(self, asked: Asked) -> None:
        script = self._script(asked.prompt)
        assert not isinstance(script, AllspanError)
        if (count := asked.params.prompt_logprobs) is not None:
            entries = tuple(prompt_logprob(token, count) for token in asked.prompt[1:])
            asked.queue.put(Output(prompt_logprobs=entries))
            await self._read(asked)
        for step in script:
            if isinstance(step, AllspanError):
                asked.queue.fail(step)
                return
            self._put(asked, tuple(step.encode()), "")
            await self._read(asked)
            if asked.stopped or asked.queue.state.is_final:
                break
        if not asked.queue.state.is_final:
            self._put(asked, (self.eos,), "cancelled" if asked.stopped else "stop")

    async def _read(self, asked: Asked) -> None:
        while asked.queue._pending is not None and not asked.stopped:
            await asyncio.sleep(0)

    def _put(self, asked: Asked, tokens: tuple[int, ...], reason: str) -> None:
        room = asked.params.max_tokens - asked.steps
        if len(tokens) >= room and reason != "cancelled":
            tokens, reason = tokens[:room], reason if len(tokens) == room and reason else "length"
        asked.steps += len(tokens)
        timings = RequestTimings(0.0, 0.001, 0.002, len(asked.prompt), 2, asked.steps) if reason else None
        logprobs: tuple[TokenLogprob, ...] = ()
        if (count := asked.params.logprobs) is not None:
            logprobs = tuple(TokenLogprob(-0.5, tuple((t + i, -0.5 - i) for i in range(count))) for t in tokens)
        asked.queue.put(Output(tokens, logprobs, reason, self.eos if reason == "stop" else None, timings))
