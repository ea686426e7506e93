"""Tokens drawn from logits by top-k, top-p and min-p, beside FlashInfer (softmax, then a sampler; it compiles for a
minute or more where nothing is in its cache) and torch's sort."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.abi.sampling import SETTINGS
from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.sampling.best_tokens import best_tokens
from allspan.kernels.cuda.sampling.sample_rows import Wanted, sample_rows
from allspan.kernels.cuda.sampling.workspace import sampling_workspace

MOST_SETS = 8
CHECKED_ROWS = 64
"""Whose tokens are looked up among those that may be drawn."""


@dataclass(frozen=True)
class Filter:
    """0 and 1 and 0: none."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def name(self) -> str:
        words = {"top_k": self.top_k, "top_p": self.top_p % 1, "min_p": self.min_p}
        return " ".join(f"{word} {value:g}" for word, value in words.items() if value)


FILTERS = (None, Filter(50, 0.9), Filter(top_p=0.9), Filter(min_p=0.1))
"""None: the most likely token."""


def sampling_cases() -> Iterator[Case]:
    for vocab, rows, how in itertools.product((32_000, 128_256, 152_064), (1, 64, 512), FILTERS):
        name = f"{rows} row{'s' * (rows > 1)} of {vocab:,}, {how.name if how else 'greedy'}"
        yield Case("sampling", name, partial(build, rows, vocab, how))


def build(rows: int, vocab: int, how: Filter | None, device: str) -> Built:
    sets = min(MOST_SETS, sets_for(rows * vocab * 4))
    logits = torch.randn(sets, rows, vocab, device=device) * 3
    out = torch.empty(rows, dtype=torch.int32, device=device)
    workspace = sampling_workspace(rows, vocab, device)
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    wanted, table = Wanted(numbers, numbers), _settings(rows, how or Filter()).to(device)

    def ours(i: int) -> None:
        if how is None:
            best_tokens(logits[i], out, workspace)
        else:
            sample_rows(logits[i], wanted, table, out, workspace)

    def check(name: str) -> None:
        out.fill_(-7)
        ours(0)
        if how is None:
            assert torch.equal(out.long(), logits[0].argmax(1))
        else:
            assert (out >= 0).all()
            few = slice(0, CHECKED_ROWS)
            assert _support(logits[0, few], how).gather(1, out[few, None].long()).all()

    return Built({"allspan": ours}, check, sets, rows * vocab * 4, peers=_peers(logits, how))


def _settings(rows: int, how: Filter) -> Tensor:
    """uint8 [rows, 40]."""
    settings = np.zeros(rows, SETTINGS)
    min_z = math.log(how.min_p) if how.min_p else -math.inf
    settings[:] = [(i, how.top_p, 1.0, 1.0, min_z, how.top_k, 1) for i in range(rows)]
    return torch.from_numpy(settings.view(np.uint8).reshape(rows, SETTINGS.itemsize))


def _support(logits: Tensor, how: Filter) -> Tensor:
    """Tokens that may be drawn, with those on the edge: bool [rows, vocab]."""
    p, tokens = logits.double().softmax(1).sort(1, descending=True)
    if how.top_k:
        p[:, how.top_k :] = 0
    before = p.cumsum(1) - p
    allowed = (p > 0) & (before / p.sum(1, keepdim=True) <= how.top_p + 1e-6) & (p >= p[:, :1] * how.min_p * 0.999)
    return torch.zeros_like(allowed).scatter(1, tokens, allowed)


def _peers(logits: Tensor, how: Filter | None) -> dict[str, partial[Launch]]:
    if how is None:
        return {"torch argmax": partial(_argmax, logits)}
    peers = {"FlashInfer": partial(_flashinfer, logits, how), "torch sort": partial(_sorts, logits, how)}
    if not how.top_k:
        peers["FlashInfer, its softmax"] = partial(_flashinfer, logits, how, has_own_softmax=True)
    return peers


def _argmax(logits: Tensor) -> Launch:
    return lambda i: logits[i].argmax(1)


def _flashinfer(logits: Tensor, how: Filter, has_own_softmax: bool = False) -> Launch:
    sampler = importlib.import_module("flashinfer.sampling")
    softmax = sampler.softmax if has_own_softmax else partial(torch.softmax, dim=1)
    if how.top_k:
        return lambda i: sampler.top_k_top_p_sampling_from_logits(logits[i], how.top_k, how.top_p)
    if how.min_p:
        return lambda i: sampler.min_p_sampling_from_probs(softmax(logits[i]), how.min_p)
    return lambda i: sampler.top_p_sampling_from_probs(softmax(logits[i]), how.top_p)


def _sorts(logits: Tensor, how: Filter) -> Launch:
    def run(i: int) -> Tensor:
        ordered, tokens = logits[i].sort(1, descending=True)
        if how.top_k:
            ordered[:, how.top_k :] = -math.inf
        p = ordered.softmax(1)
        p = torch.where((p.cumsum(1) - p > how.top_p) | (p < p[:, :1] * how.min_p), 0.0, p)
        return tokens.gather(1, (p / torch.empty_like(p).exponential_()).argmax(1, keepdim=True))

    return run
