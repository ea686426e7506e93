"""Rows with a grammar on a GPU: what the host samples, masks and fails, the GPU does, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from allspan.kernels.abi.sampling import ALL_MASKED
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.backend.cuda.sampling import DeviceSampling
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.failure import GRAMMAR_ENDED
from allspan.worker.sampling.grammar_cache import Grammars
from allspan.worker.sampling.sampler import Sampler
from support.byte_tokenizer import byte_tokenizer

V, EOS, STEPS = 300, 299, 8
WORD, HELLO = Grammar("regex", "[a-z]{2,5}[0-9]?"), Grammar("choice", '["hello"]')
ASKED: list[dict[str, Any]] = [
    {"grammar": WORD, "logprobs": 3},
    {"grammar": HELLO, "ignore_eos": True},
    {"grammar": HELLO, "allowed_token_ids": (*b"helo", EOS)},
    {"grammar": HELLO, "allowed_token_ids": tuple(b"helo"), "logprobs": 0},
    {"grammar": WORD, "min_tokens": 3, "frequency_penalty": 1.5, "logit_bias": {ord("q"): 9.0}, "temperature": 0.0},
    {"temperature": 0.0},
    {"allowed_token_ids": (5, 6, 7)},
]


def test_rows_with_grammars_get_the_tokens_and_ends_of_the_host(device: str, small: dict[str, int]) -> None:
    grammars = Grammars("-", V)
    grammars.load_tokenizer = byte_tokenizer
    kernel = Sampling(device=DeviceSampling(len(ASKED), V, torch.device(device), small))
    both = [Sampler(len(ASKED), (V,), LocalCollectives(), (EOS,), each) for each in (kernel, None)]
    tokens = np.zeros((len(ASKED), 32), dtype=np.int32)
    for row, asked in enumerate(ASKED):
        params = SamplingParams(seed=row, **asked)
        for one in both:
            grammar = params.grammar and grammars.compiled(params.grammar)
            one.add(row, params, 4, tokens[row], grammar)
    ours, theirs = both
    assert [ours.samples_ahead(SamplingParams(seed=0, **asked)) for asked in ASKED].count(False) >= 4
    running, ends = np.arange(len(ASKED)), {}
    for step in range(STEPS):
        positions = np.full(len(running), 4 + step)
        logits = torch.randn(len(running), V, generator=torch.Generator().manual_seed(step)) * 3
        found = []
        for one, where in ((ours, device), (theirs, "cpu")):
            one.prepare(running, positions, None)
            found.append(one.sample(logits.clone().to(where), running, positions))
        assert found[0].tokens.tolist() == found[1].tokens.tolist()
        assert found[0].logprobs == found[1].logprobs
        tokens[running, positions] = found[0].tokens
        over = (found[0].tokens < 0) | (found[0].tokens == EOS)
        ends |= dict(zip(running[over].tolist(), found[0].tokens[over].tolist(), strict=True))
        running = running[~over]
    assert {row: ends[row] for row in (0, 1, 2, 3)} == {0: EOS, 1: GRAMMAR_ENDED, 2: EOS, 3: ALL_MASKED}
    assert bytes(tokens[1, 4:9].tolist()) == b"hello"
