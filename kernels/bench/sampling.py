"""Tokens drawn from logits by top-k and top-p, beside FlashInfer (softmax, then its sampler) and torch's sort."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.sampling import SETTINGS_BYTES, best_tokens, sample_rows, sampling_workspace

TOP_K, TOP_P = 50, 0.9
SETTINGS = np.dtype("u8,f8,f8,f4,f4,i4,i4")
"""Seed, top_p, typical_p, temperature, logarithm of min_p, top_k, whether it is random."""


def sampling_cases() -> Iterator[Case]:
    for vocab, rows in itertools.product((32_000, 128_256, 152_064), (1, 64, 512)):
        for is_greedy in (True, False):
            how = "greedy" if is_greedy else f"top_k {TOP_K} top_p {TOP_P}"
            yield Case(
                "sampling",
                f"{rows} row{'s' * (rows > 1)} of {vocab:,}, {how}",
                partial(build, rows, vocab, is_greedy),
            )


def build(rows: int, vocab: int, is_greedy: bool, device: str) -> Built:
    sets = min(8, sets_for(rows * vocab * 4))
    logits = torch.randn(sets, rows, vocab, device=device) * 3
    out = torch.empty(rows, dtype=torch.int32, device=device)
    workspace = sampling_workspace(rows, vocab, device)
    settings = np.zeros(rows, SETTINGS)
    settings[:] = [(i, TOP_P, 1.0, 1.0, -np.inf, TOP_K, 1) for i in range(rows)]
    assert SETTINGS.itemsize == SETTINGS_BYTES
    table = torch.from_numpy(settings.view(np.uint8).reshape(rows, -1)).to(device)
    numbers = torch.arange(rows, dtype=torch.int32, device=device)

    def ours(i: int) -> None:
        if is_greedy:
            best_tokens(logits[i], out, workspace)
        else:
            sample_rows(logits[i], numbers, numbers, None, table, out, workspace)

    def check(name: str) -> None:
        out.fill_(-7)
        ours(0)
        if is_greedy:
            assert torch.equal(out.long(), logits[0].argmax(1))
        else:
            assert _support(logits[0]).gather(1, out[:, None].long()).all()

    peers = (
        {"torch argmax": lambda: lambda i: logits[i].argmax(1)}
        if is_greedy
        else {
            "FlashInfer": lambda: _flashinfer(logits),
            "torch sort": lambda: lambda i: _sorted(logits[i]),
        }
    )
    return Built({"allspan": ours}, check, sets, rows * vocab * 4, peers=peers)


def _support(logits: Tensor) -> Tensor:
    """Tokens that may be drawn, with those on the edge of top_p: bool [rows, vocab]."""
    most, tokens = logits.double().softmax(1).topk(TOP_K)
    before = most.cumsum(1) - most
    allowed = before / most.sum(1, keepdim=True) <= TOP_P + 1e-6
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, tokens, allowed)


def _flashinfer(logits: Tensor) -> Launch:
    sampler = importlib.import_module("flashinfer.sampling")

    def run(i: int) -> None:
        sampler.top_k_top_p_sampling_from_logits(logits[i], TOP_K, TOP_P, filter_apply_order="top_k_first")

    return run


def _sorted(logits: Tensor) -> Tensor:
    ordered, tokens = logits.sort(1, descending=True)
    ordered[:, TOP_K:] = float("-inf")
    p = ordered.softmax(1)
    p[p.cumsum(1) - p > TOP_P] = 0
    noise = torch.empty_like(p).exponential_()
    return tokens.gather(1, (p / noise).argmax(1, keepdim=True))
