"""Turns a request's tokens into text: incrementally, never half a character, cut before a stop string.

Shared by both engines' `generate` and the gateway. The request's owner stops it on the engine when
`TextDelta.stopped_early` is set:

    stream = TextStream(tokenizer, params)
    async for output in queue:
        delta = stream.push(output)
        if delta.stopped_early:
            engine.stop_request(handle)
        if delta.finished:
            break
"""

from __future__ import annotations

from dataclasses import dataclass

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.results import Output, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text.stream.detokenizer import Detokenizer
from allspan.protos.text.stream.stop import StopStrings
from allspan.protos.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that one `Output` adds. `finish_reason` is "" while the request continues, else "stop", "length" or
    "cancelled"."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str = ""
    stop: str | int | None = None
    """The stop string or token id that ended the output, if one did."""
    stopped_early: bool = False
    """A stop string ended the text here while the engine still generates: stop the request there."""

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The choice of which parts of an output become text."""

    skip_special_tokens: bool = True
    """Leaves control tokens out of the text."""
    include_stop: bool = False
    """The stop string, or the token that ended the output, stands at the text's end."""
    detokenize: bool = True
    """If False, there is no text at all, only token ids."""
    only_prompt: bool = False
    """Drops text and tokens: only the prompt's log-probabilities are requested. Ends with "length"."""


PLAIN_TEXT = TextOptions()


class TextStream:
    """The text of one request, from its outputs in order. The text leaves out special tokens and the token that ended
    it, unless `options` say otherwise.

    `continues`: the text goes on from the prompt's, so that a first word keeps its space (see Detokenizer).
    Without a tokenizer the text stays empty; stop strings need one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        continues: bool = False,
        options: TextOptions = PLAIN_TEXT,
    ) -> None:
        if tokenizer is None and params.stop:
            raise InvalidRequest(f"stop is {list(params.stop)}, the model has no tokenizer; use stop_token_ids", "stop")
        if not options.detokenize and params.stop:
            raise InvalidRequest("detokenize is false, which needs stop to be empty; use stop_token_ids", "detokenize")
        shown = tokenizer if options.detokenize else None
        self._detokenizer = Detokenizer(shown, options.skip_special_tokens, continues) if shown else None
        self._stops = StopStrings(params.stop) if params.stop else None
        self._include_stop = options.include_stop
        self._only_prompt = options.only_prompt
        self._finished = False

    def push(self, output: Output) -> TextDelta:
        """Returns the text that is certain: a possible beginning of a stop string, or half a character, waits for the
        next push or the end.

        With stop strings, tokens after the one that completed the first match are dropped, however outputs were merged.
        Empty deltas once it has finished.
        """
        if self._finished:
            return TextDelta("", (), ())
        if self._only_prompt:
            self._finished = bool(output.token_ids or output.finish_reason)
            return TextDelta("", (), (), "length" if output.token_ids else output.finish_reason)
        if self._stops is None:
            return self._push_all(output)
        return self._push_until_stop(output, self._stops)

    def _push_all(self, output: Output) -> TextDelta:
        text = self._text(self._visible(output))
        if output.finish_reason:
            self._finished = True
            text += self._rest()
        return TextDelta(text, output.token_ids, output.logprobs, output.finish_reason, output.stop_token_id)

    def _push_until_stop(self, output: Output, stops: StopStrings) -> TextDelta:
        text = ""
        for count, token_id in enumerate(self._visible(output), start=1):
            sure, matched = stops.push(self._text((token_id,)))
            text += sure
            if matched is not None:
                return self._cut(text, output, count, matched)
        if not output.finish_reason:
            return TextDelta(text, output.token_ids, output.logprobs)
        sure, matched = stops.push(self._rest())
        text += sure
        if matched is not None:
            return self._cut(text, output, len(output.token_ids), matched)
        self._finished = True
        text += stops.finish()
        return TextDelta(text, output.token_ids, output.logprobs, output.finish_reason, output.stop_token_id)

    def _text(self, token_ids: tuple[int, ...]) -> str:
        return self._detokenizer.push(token_ids) if self._detokenizer else ""

    def _rest(self) -> str:
        return self._detokenizer.finish() if self._detokenizer else ""

    def _cut(self, text: str, output: Output, count: int, stop: str) -> TextDelta:
        self._finished = True
        early = not output.finish_reason
        text += stop if self._include_stop else ""
        return TextDelta(text, output.token_ids[:count], output.logprobs[:count], "stop", stop, early)

    def _visible(self, output: Output) -> tuple[int, ...]:
        """The tokens that show as text: all but a last one that ended the output."""
        ids = output.token_ids
        ended = not self._include_stop and output.stop_token_id is not None
        return ids[:-1] if ended and ids and ids[-1] == output.stop_token_id else ids
