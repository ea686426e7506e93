"""A drafter is a new class and a row of DRAFTERS: whatever it proposes, no request's tokens change."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.results import Output
from allspan.protos.config.speculation import Speculation
from allspan.worker.scheduler.drafting import table
from allspan.worker.scheduler.request import Request
from support.byte_tokenizer import byte_tokenizer
from support.cores import Collected, fake_core, request, step_until_idle
from support.drafters import Guesses

EOS = 96
ASKED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 0.5, "no_repeat_ngram_size": 2, "allowed_token_ids": tuple(range(40, 60))},
    {"temperature": 0.9, "bad_words_ids": ((7,), (8, 9)), "logit_bias": {3: 2.0}},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, 96, 7)), "min_tokens": 3, "logprobs": 0},
    {"temperature": 1.0, "stop_words_ids": tuple((token,) for token in range(0, 96, 6))},
    {"temperature": 1.0, "grammar": Grammar("regex", "[A-F0-9]{5,9}Z")},
    {"temperature": 0.0, "grammar": Grammar("regex", "(AB|BA)+"), "logprobs": 1},
    {"temperature": 1.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "max_tokens": 1},
]


class Toy(Guesses):
    """Proposes what `tokens` has for a request, or something else."""

    def __init__(self, tokens: dict[bytes, tuple[int, ...]], kind: str) -> None:
        self.tokens = tokens
        self.num_proposed = 0
        self._kind = kind
        self._random = random.Random(1)

    def guess(self, request: Request, most: int) -> Sequence[int]:
        at = len(request.output_token_ids)
        right = self.tokens[request.request_id][at : at + most]
        proposed = [self._change(token) for token in right] + [5, 6, 99]
        self.num_proposed += len(proposed)
        return proposed

    def _change(self, token: int) -> int:
        is_right = self._kind == "right" or (self._kind == "random" and self._random.random() < 0.7)
        return token if is_right else (token + 1) % 97


def play(most: int = 0, **limits: int) -> tuple[dict[bytes, Output], int]:
    """What each of ASKED gets, and in how many steps."""
    collected = Collected()
    core, _ = fake_core(collected=collected, eos=(EOS,), **limits)
    core.grammars.load_tokenizer = byte_tokenizer
    if most:
        core.draft_with(Speculation("toy", most))
    for number, asked in enumerate(ASKED):
        core.submit(request(number, [number + 1, 5, 6, 5], **{"max_tokens": 14, **asked}))
    step_until_idle(core)
    assert not collected.errors
    return collected.outputs, core.steps


def told(output: Output) -> tuple[object, ...]:
    """All but how long it took."""
    return output.token_ids, output.logprobs, output.finish_reason, output.stop_token_id, output.prompt_logprobs


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
@pytest.mark.parametrize("limits", [{}, {"num_pages": 12}, {"max_num_batched_tokens": 5}], ids=str)
def test_drafts_change_no_token(kind: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_steps = play(**limits)
    toy = Toy({key: output.token_ids for key, output in plain.items()}, kind)
    monkeypatch.setitem(table.DRAFTERS, "toy", lambda asked: (toy,))
    for most in (1, 4):
        found, steps = play(most, **limits)
        for key, output in plain.items():
            assert told(found[key]) == told(output)
        assert steps < plain_steps if kind == "right" and not limits else toy.num_proposed
    assert {output.finish_reason for output in plain.values()} == {"stop", "length"}


def test_an_unknown_method_is_refused_with_those_that_there_are() -> None:
    core, _ = fake_core()
    with pytest.raises(
        ConfigError, match="speculation method is 'eagle', must be one of draft_model, eagle3, mtp, ngram, suffix"
    ):
        core.draft_with(Speculation("eagle", 3))
