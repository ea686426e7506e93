"""Sampling on a GPU gives the tokens of numpy, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from allspan.kernels.abi.sampling import SETTINGS
from allspan.kernels.cuda.sampling.best_tokens import best_tokens
from allspan.kernels.cuda.sampling.likely_tokens import likely_tokens
from allspan.kernels.cuda.sampling.sample_rows import Wanted, sample_rows
from allspan.kernels.cuda.sampling.workspace import SamplingWorkspace, sampling_workspace
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.sampling.kernel import ReferenceKernel, SamplingKernel, Settings, sampling_kernel, settings_of

FILTERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.02},
    {"top_k": 5},
    {"top_k": 300, "temperature": 1.3},
    {"top_p": 0.7},
    {"top_p": 0.95, "temperature": 3.0},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.3, "min_p": 0.001, "temperature": 0.01},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.8},
    {"typical_p": 0.6, "temperature": 2.0},
    {"top_p": 1e-300},
    {"top_p": 1 - 2**-53, "temperature": 100.0},
    {"min_p": 1.0},
    {"top_k": 10**6, "top_p": 0.5},
]


def table(params: list[SamplingParams]) -> Settings:
    settings = np.zeros(len(params), dtype=SETTINGS)
    for i, each in enumerate(params):
        settings[i] = settings_of(each)
    return settings


def rows_of_logits(m: int, vocab: int, seed: int) -> np.ndarray:
    """Of each kind some: spread, flat, all alike, ties, few that are not masked, far apart, steep."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((m, vocab))
    scales = (2.0, 0.5, 0.0, 4.0, 1e-6, 1e36, 10.0)
    for i in range(m):
        logits[i] *= scales[(i + seed) % len(scales)]
        if (i + seed) % 4 == 3:
            logits[i] = logits[i].round()
        if (i + seed) % 5 == 4:
            logits[i, rng.random(vocab) < 0.9] = -math.inf
            logits[i, rng.integers(vocab)] = 1.0
    return logits.astype(np.float32)


def on(device: str, array: np.ndarray, dtype: type) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.astype(dtype))).to(device)


def sampled(
    logits: np.ndarray,
    params: list[SamplingParams],
    positions: np.ndarray,
    targets: np.ndarray | None,
    device: str,
    workspace: SamplingWorkspace,
) -> list[int]:
    m = len(logits)
    out = torch.full((m, 3), 77, dtype=torch.int32, device=device)
    rows = on(device, np.arange(m)[::-1], np.int32)
    settings = on(device, table(params).view(np.uint8).reshape(len(params), -1), np.uint8)
    known = None if targets is None else on(device, targets, np.int32)
    wanted = Wanted(rows, on(device, positions, np.int32), known)
    sample_rows(on(device, logits, np.float32), wanted, settings, out, workspace)
    assert (out[:, 1:] == 77).all()
    return out[:, 0].tolist()


def expected(
    kernel: SamplingKernel, logits: np.ndarray, params: list[SamplingParams], positions: np.ndarray, targets: np.ndarray
) -> list[int]:
    out = np.zeros((len(logits), 1), dtype=np.int32)
    rows = np.arange(len(logits))[::-1].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        kernel.sample_rows(logits, rows, positions.astype(np.int64), targets.astype(np.int64), table(params), out)
    return out[:, 0].tolist()


def check_draws(m: int, vocab: int, seed: int, device: str, workspace: SamplingWorkspace) -> None:
    logits = rows_of_logits(m, vocab, seed)
    params = [SamplingParams(seed=i * 2**33 + seed, **FILTERS[(i + seed) % len(FILTERS)]) for i in range(m)]
    positions = np.arange(m) * 7 + seed
    targets = np.full(m, -1)
    targets[4::11] = vocab - 1
    kernel = ReferenceKernel() if vocab < 20000 else sampling_kernel()
    wanted = expected(kernel, logits, params, positions, targets)
    assert sampled(logits, params, positions, targets, device, workspace) == wanted


@pytest.mark.parametrize(
    ("vocab", "more"),
    [(1, {}), (2, {"cluster": 2}), (63, {}), (257, {"cluster": 2}), (1031, {"kept": 0}), (1031, {"kept": 512}),
     (1500, {"cluster": 4, "kept": 0}), (3000, {"cluster": 2, "kept": 1024})],
)  # fmt: skip
def test_draws_of_small_vocabularies_are_those_of_numpy(
    vocab: int, more: dict[str, int], device: str, small: dict[str, int]
) -> None:
    """In small blocks with little room, so that lists overflow, some of a row is not kept, and blocks share it."""
    workspace = sampling_workspace(17, vocab, device, **small, **more)
    for seed in range(2 if device == "cpu" else 20):
        check_draws(17, vocab, seed, device, workspace)


def test_rows_may_begin_anywhere(device: str, small: dict[str, int]) -> None:
    """A vocabulary that is no multiple of 4, and rows from the second on."""
    logits = rows_of_logits(6, 301, 0)
    logits[0] = math.nan
    here = on(device, logits, np.float32)
    workspace = sampling_workspace(5, 301, device, cluster=2, **small)
    settings = on(device, table([SamplingParams(seed=5, top_p=0.9)]).view(np.uint8).reshape(1, -1), np.uint8)
    zeros, out = torch.zeros(5, dtype=torch.int32, device=device), torch.zeros((2, 5), dtype=torch.int32, device=device)
    sample_rows(here[1:], Wanted(zeros, zeros), settings, out[0], workspace)
    best_tokens(here[1:], out[1], workspace)
    draws = expected(
        ReferenceKernel(), logits[1:], [SamplingParams(seed=5, top_p=0.9)] * 5, np.zeros(5), np.full(5, -1)
    )
    assert out.tolist() == [draws, logits[1:].argmax(1).tolist()]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 32768, 50257, 128256, 151936])
@pytest.mark.parametrize("m", [1, 3, 17, 64, 170, 512])
def test_draws_are_those_of_compiled_code(m: int, vocab: int) -> None:
    workspace = sampling_workspace(m, vocab, "cuda")
    for seed in range(1 if m > 100 else 17):
        check_draws(m, vocab, seed, "cuda", workspace)


@pytest.mark.parametrize("vocab", [1, 3, 65, 1500])
def test_the_best_tokens_are_those_of_numpy_and_bad_rows_have_none(
    vocab: int, device: str, small: dict[str, int]
) -> None:
    logits = np.round(rows_of_logits(8, vocab, 3))
    logits[1, vocab // 2] = math.nan
    logits[2, vocab - 1] = math.inf
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, 0] = math.nan
    logits[5] = -0.0
    logits[5, vocab // 3] = 0.0
    workspace = sampling_workspace(9, vocab, device, **small)
    out = torch.full((8,), 77, dtype=torch.int32, device=device)
    best_tokens(on(device, logits, np.float32), out, workspace)
    wanted = np.zeros(8, dtype=np.int32)
    ReferenceKernel().best_tokens(logits, wanted)
    assert out.tolist() == wanted.tolist()
    params = [SamplingParams(seed=1, top_k=k) for k in (0, 2)] * 4
    positions, targets = np.arange(8), np.where(np.arange(8) % 2, -1, 0)
    found = sampled(logits, params, positions, targets, device, workspace)
    assert found == expected(ReferenceKernel(), logits, params, positions, targets)


def test_rows_that_nobody_has_are_left_alone(device: str, small: dict[str, int]) -> None:
    workspace = sampling_workspace(3, 500, device, **small)
    settings = on(device, table([SamplingParams(seed=1)]).view(np.uint8).reshape(1, -1), np.uint8)
    out = torch.full((3,), 77, dtype=torch.int32, device=device)
    rows = torch.tensor([-1, 0, -1], dtype=torch.int32, device=device)
    logits = on(device, rows_of_logits(3, 500, 1), np.float32)
    sample_rows(logits, Wanted(rows, torch.zeros_like(rows)), settings, out, workspace)
    assert out[0] == out[2] == 77
    assert 0 <= int(out[1]) < 500


def check_likely(m: int, vocab: int, seed: int, device: str, workspace: SamplingWorkspace) -> None:
    logits = rows_of_logits(m, vocab, seed)
    limits = np.minimum(np.arange(m) % 5 * 5 - 1, vocab)
    tokens = np.full((m, 42), 77, dtype=np.int32)
    tokens[:, 0] = np.arange(m) * 31 % vocab
    tokens[5::7, 0] = -1
    found = torch.zeros((m, 44), dtype=torch.int32, device=device)
    ours = on(device, tokens, np.int32)
    likely_tokens(on(device, logits, np.float32), ours, on(device, limits, np.int32), found, workspace)
    wanted = tokens.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        sampling_kernel().log_softmax_rows(logits, limits.astype(np.int64), wanted)
    words = found.cpu().numpy()
    for i in np.flatnonzero((limits >= 0) & (tokens[:, 0] >= 0)).tolist():
        total = int(words[i, :2].view(np.uint64)[0]) * 2.0 ** (vocab.bit_length() - 53)
        normaliser = math.log(total) + float(words[i, 2:3].view(np.float32)[0])
        values = words[i].view(np.float32)
        mine = np.concatenate((values[3:4], values[24 : 24 + limits[i]])).astype(np.float64) - normaliser
        theirs = np.concatenate((wanted[i, 1:2], wanted[i, 22 : 22 + limits[i]])).view(np.float32)
        assert mine.astype(np.float32).tolist() == theirs.tolist()
        assert words[i, 4 : 4 + limits[i]].tolist() == wanted[i, 2 : 2 + limits[i]].tolist()


@pytest.mark.parametrize("vocab", [1, 30, 700, 2000])
def test_log_probabilities_are_those_of_numpy(vocab: int, device: str, small: dict[str, int]) -> None:
    check_likely(14, vocab, 1, device, sampling_workspace(14, vocab, device, **small))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 50257, 151936])
def test_log_probabilities_are_those_of_compiled_code(vocab: int) -> None:
    workspace = sampling_workspace(64, vocab, "cuda")
    for seed in range(5):
        check_likely(64, vocab, seed, "cuda", workspace)
