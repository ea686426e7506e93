"""Drafts on a GPU: at every position the sampler draws what the host draws without drafts, and counts none that was not
kept; a step of decodes with drafts is one of decodes, and the engine's tokens are those without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from allspan import SamplingParams
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.results import TokenLogprob
from allspan.worker.backend.cuda import sampling
from allspan.worker.backend.cuda.sampling import DeviceSampling
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.grammar_cache import Grammars
from allspan.worker.sampling.sampler import Sampler
from support.byte_tokenizer import byte_tokenizer

V, EOS, PROMPT, OUTPUT = 300, 299, 4, 14
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"repetition_penalty": 1.4, "top_k": 20, "logprobs": 3},
    {"presence_penalty": 1.9, "frequency_penalty": 0.7, "temperature": 0.0},
    {"frequency_penalty": 1.1, "logit_bias": {4: 3.0}, "allowed_token_ids": tuple(range(9)), "logprobs": 0},
    {"no_repeat_ngram_size": 2, "bad_words_ids": ((5,), (6, 1)), "temperature": 0.7},
    {"min_tokens": 8, "stop_token_ids": tuple(range(4)), "top_p": 0.8},
    {"grammar": Grammar("regex", "[a-d]{2,9}[0-9]?x{20}"), "logprobs": 2, "frequency_penalty": 0.9},
    {"grammar": Grammar("regex", "(ab){9}"), "allowed_token_ids": tuple(b"ab")},
]
Told = tuple[list[list[int]], dict[int, list[TokenLogprob]]]


class Rows:
    """A sampler's rows, whose logits depend on the tokens before them."""

    def __init__(self, sampling: Sampling | None, where: str) -> None:
        grammars = Grammars("-", V)
        grammars.load_tokenizer = byte_tokenizer
        self.tokens = np.ones((len(ASKED), 64), dtype=np.int32)
        self.lengths = np.full(len(ASKED), PROMPT)
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self._sampler, self._where = Sampler(len(ASKED), (V,), LocalCollectives(), (EOS,), sampling), where
        for row, asked in enumerate(ASKED):
            params = SamplingParams(**{"seed": row, **asked})
            grammar = params.grammar and grammars.compiled(params.grammar)
            self._sampler.add(row, params, PROMPT, self.tokens[row], grammar)

    def outputs(self) -> Told:
        found = [self.tokens[row, PROMPT:length].tolist() for row, length in enumerate(self.lengths)]
        return found, self.logprobs

    def step(self, drafts: dict[int, list[int]]) -> int:
        """One step of the rows in `drafts`; returns how many of these are kept."""
        rows, positions = [], []
        for row, proposed in drafts.items():
            length = int(self.lengths[row])
            self.tokens[row, length : length + len(proposed)] = proposed
            if proposed:
                self._sampler.begin_drafts(row, length)
            rows += [row] * (1 + len(proposed))
            positions += range(length, length + len(proposed) + 1)
        at = np.array(rows), np.array(positions)
        self._sampler.prepare(*at, None)
        logits = torch.stack([self._logits(*each) for each in zip(rows, positions, strict=True)])
        sampled = self._sampler.launch(logits.to(self._where), *at).result()
        return sum(self._take(row, proposed, sampled.tokens[at[0] == row].tolist(), sampled.logprobs)
                   for row, proposed in drafts.items())  # fmt: skip

    def _logits(self, row: int, position: int) -> torch.Tensor:
        """Of few tokens, which come again, and which those before decide about."""
        last = int(self.tokens[row, position - 1])
        logits = torch.randn(V, generator=torch.Generator().manual_seed(1000 * row + position + 7919 * (last % 5)))
        logits[:8] += 4
        logits[list(b"abcdx")] += 2
        return logits

    def _take(self, row: int, proposed: list[int], made: list[int], logprobs: Any) -> int:
        kept = next(
            (i for i, (draft, token) in enumerate(zip(proposed, made, strict=False)) if draft != token), len(proposed)
        )
        length = int(self.lengths[row])
        self.tokens[row, length : length + len(made)] = made
        self.lengths[row] += kept + 1
        self.logprobs.setdefault(row, []).extend(logprobs.get(row, ())[: kept + 1])
        if proposed:
            self._sampler.retract(row, int(self.lengths[row]) - 1)
        return kept


def on_device(device: str, small: dict[str, int]) -> Rows:
    return Rows(Sampling(device=DeviceSampling(len(ASKED), V, torch.device(device), small)), device)


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_every_position_gets_the_token_that_the_host_draws_without_drafts(
    kind: str, device: str, small: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_MOST_ROWS", 7 if kind == "mixed" else 64)  # so that a request's are cut apart
    plain, rng = Rows(None, "cpu"), np.random.default_rng(5)
    while plain.lengths.max() < PROMPT + OUTPUT + 8:
        plain.step({row: [] for row in range(len(ASKED))})
    wanted, wanted_logprobs = plain.outputs()
    ours, kept, drafted = on_device(device, small), 0, 0
    while ours.lengths.min() < PROMPT + OUTPUT:
        drafts: dict[int, list[int]] = {}
        for row in rng.permutation(len(ASKED)).tolist():
            done = int(ours.lengths[row]) - PROMPT
            if done < OUTPUT:
                right = wanted[row][done : done + int(rng.integers(0, 5))]
                is_wrong = {"right": 0.0, "wrong": 1.0, "mixed": 0.3}[kind]
                drafts[row] = [int(rng.integers(V)) if rng.random() < is_wrong else token for token in right]
        kept, drafted = kept + ours.step(drafts), drafted + sum(map(len, drafts.values()))
    found, logprobs = ours.outputs()
    for row, tokens in enumerate(found):
        assert tokens == wanted[row][: len(tokens)], ASKED[row]
        assert logprobs.get(row, []) == wanted_logprobs.get(row, [])[: len(logprobs.get(row, []))]
    assert {"right": kept == drafted, "wrong": kept < 0.1 * drafted, "mixed": 0 < kept < drafted}[kind]
