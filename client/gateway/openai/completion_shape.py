"""text_completion: choices whole and in pieces, with the prompt before them where it is echoed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allspan.client.gateway.admission.active_request import ActiveRequest, PromptLogprob
from allspan.client.gateway.openai.shapes import Gathered, Json, TokenTexts
from allspan.protos.api.results import TokenLogprob
from allspan.protos.text import Detokenizer, Tokenizer
from allspan.protos.text.stream.text_stream import TextDelta


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of the answer that the caller requested beside the text."""

    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    tokens_as_ids: bool
    skip_special_tokens: bool


class CompletionShape:
    """The shape of text completions, the same whole and in chunks. `echoes`: a text a prompt, or none at all."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    envelope: Json = {}  # noqa: RUF012 - read only

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: Shown,
        prompts: Sequence[Sequence[int]],
        choices: int,
        echoes: Sequence[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer, shown.tokens_as_ids)
        self._shown = shown
        self._prompts = prompts
        self._choices = choices
        self._echoes = echoes
        self._offsets: dict[int, _Offsets] = {}
        self._unopened: dict[int, ActiveRequest] = {}
        """Streams whose prompt has not been sent yet."""

    def usage_details(self) -> Json:
        return {}

    def opening(self, index: int, generation: ActiveRequest) -> list[Json]:
        """Returns no choice yet: the prompt's data is complete with the first token."""
        if self._echoes or self._shown.token_ids:
            self._unopened[index] = generation
        return []

    def pieces(self, index: int, delta: TextDelta) -> list[Json]:
        pieces = []
        if index in self._unopened and (delta.token_ids or delta.finished):
            entries = self._unopened.pop(index).prompt_logprobs
            pieces.append(self._choice(index, self._echo(index), self._logprobs(index, entries, Gathered()), None))
            if self._shown.token_ids:
                pieces[0] |= {"prompt_token_ids": list(self._prompt(index)), "token_ids": []}
        told = (self._shown.logprobs is not None or self._shown.token_ids) and delta.token_ids
        if delta.text or delta.finished or told:
            output = Gathered([delta.text], list(delta.token_ids), list(delta.logprobs))
            logprobs = self._logprobs(index, None, output)
            piece = self._choice(index, delta.text, logprobs, delta.finish_reason or None)
            if self._shown.token_ids:
                piece["token_ids"] = output.token_ids
            pieces.append(piece)
        return pieces

    def choice(self, index: int, gathered: Gathered) -> Json:
        logprobs = self._logprobs(index, gathered.prompt_logprobs, gathered)
        text = self._echo(index) + "".join(gathered.texts)
        choice = self._choice(index, text, logprobs, gathered.finish_reason)
        if (count := self._shown.prompt_logprobs) is not None:
            entries = [(token_id, _likeliest(entry, count)) for token_id, entry in gathered.prompt_logprobs]
            choice["prompt_logprobs"] = self._texts.of_prompt(entries)
        if self._shown.token_ids:
            choice |= {"prompt_token_ids": list(self._prompt(index)), "token_ids": gathered.token_ids}
        return choice

    def extras(self, gathered: Sequence[Gathered]) -> Json:
        return {}

    def _prompt(self, index: int) -> Sequence[int]:
        return self._prompts[index // self._choices]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def _choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, prompt: Sequence[PromptLogprob] | None, output: Gathered) -> Json | None:
        """Returns the log-probabilities of the output's tokens, and before them of the echoed prompt's, whose first has
        none (None: not now)."""
        count = self._shown.logprobs
        if count is None:
            return None
        entries: list[tuple[int, TokenLogprob | None]] = []
        if prompt is not None and self._echoes:
            entries = [(self._prompt(index)[0], None), *prompt]
        entries += zip(output.token_ids, output.logprobs, strict=True)
        offsets = self._offsets.get(index)
        if offsets is None:
            continues = not self._echoes
            offsets = _Offsets(Detokenizer(self._tokenizer, self._shown.skip_special_tokens, continues))
            self._offsets[index] = offsets
        return {
            "tokens": [self._texts.text(token_id) for token_id, _ in entries],
            "token_logprobs": [entry and entry.logprob for _, entry in entries],
            "top_logprobs": [entry and self._top(token_id, _likeliest(entry, count)) for token_id, entry in entries],
            "text_offset": [offsets.of_next(token_id) for token_id, _ in entries],
        }

    def _top(self, token_id: int, entry: TokenLogprob) -> dict[str, float]:
        """The chosen token is always among them; tokens with the same text share the better value."""
        top = {self._texts.text(token_id): entry.logprob}
        for top_id, logprob in reversed(entry.top):
            top[self._texts.text(top_id)] = logprob
        return top


class _Offsets:
    """The offset of each token's first character in the text; a character in several tokens begins with its last."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._length = 0

    def of_next(self, token_id: int) -> int:
        at = self._length
        self._length += len(self._detokenizer.push((token_id,)))
        return at


def _likeliest(entry: TokenLogprob, count: int) -> TokenLogprob:
    """Returns the entry with `count` of its likeliest tokens; another field may have requested more."""
    return TokenLogprob(entry.logprob, entry.top[:count])
