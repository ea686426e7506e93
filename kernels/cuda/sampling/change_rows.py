"""Penalties, biases and masks on rows of logits on a GPU, in place: see change_rows.cu."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.abi.sampling import CHANGES
from allspan.kernels.cuda.jit.modules import Kernel, kernel, launch

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_THREADS, _LOADS = 256, 4


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    return [_kernel(name) for name in ("change", "note_tokens", "note_sampled", "ban_tokens")]


def change_rows(logits: Tensor, changes: Tensor, counts: Tensor, biases: Tensor, masks: Tensor, flags: Tensor) -> None:
    """Changes rows of `logits` float32 [m, vocab] as `changes` uint8 [n, 40] says, each row at most once.

    counts int32 [, vocab]: how often each token stands in an output, the highest bit for one in the prompt; biases
    float32 [, vocab]; masks int32 [, ceil(vocab / 32)]: bit t % 32 of word t // 32 is of a token t that is allowed.
    flags int32 [m] tells `sample_rows` (is_changed) what the logits were before. Raises ValueError for what does not
    fit, as all functions here do.
    """
    vocab = logits.shape[1]
    widths = {"counts": (counts, vocab), "biases": (biases, vocab), "masks": (masks, -(-vocab // 32))}
    for name, (tensor, width) in widths.items():
        if tensor.shape[1:] != (width,) or not tensor.is_contiguous() or tensor.element_size() != 4:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not [, {width}] of 4 bytes, contiguous")
    if changes.dtype is not torch.uint8 or changes.shape[1:] != (CHANGES.itemsize,) or not changes.is_contiguous():
        raise ValueError(f"changes: {changes.dtype} {tuple(changes.shape)} is not uint8 [n, {CHANGES.itemsize}]")
    _check_logits(logits)
    if len(changes):
        blocks = (-(-vocab // (_THREADS * _LOADS * 4)), len(changes))
        arguments = [logits, np.int32(vocab), changes, counts, biases, masks, flags]
        launch(_kernel("change"), blocks, _THREADS, arguments)


def note_tokens(counts: Tensor, entries: Tensor) -> None:
    """Counts tokens: entries int32 [n, 2] of a row of `counts` and a token; ~token for one in the prompt."""
    _launch("note_tokens", counts, entries)


def note_sampled(counts: Tensor, entries: Tensor, tokens: Tensor) -> None:
    """Counts tokens of outputs that the host need not know: entries int32 [n, 2] of a row of `counts` and a place in
    `tokens` int32; negative tokens do not count."""
    _check_ints(tokens)
    _launch("note_sampled", counts, entries, tokens)


def ban_tokens(logits: Tensor, entries: Tensor) -> None:
    """logits[row, token] = -inf for entries int32 [n, 2] of a row and a token."""
    _check_logits(logits)
    _launch("ban_tokens", logits, entries)


def _launch(name: str, rows: Tensor, entries: Tensor, *more: Tensor) -> None:
    if entries.dtype is not torch.int32 or entries.shape[1:] != (2,) or not entries.is_contiguous():
        raise ValueError(f"entries: {entries.dtype} {tuple(entries.shape)} is not int32 [n, 2]")
    if len(entries):
        arguments = [rows, np.int32(rows.shape[1]), entries, np.int32(len(entries)), *more]
        launch(_kernel(name), (-(-len(entries) // _THREADS),), _THREADS, arguments)


def _kernel(name: str) -> Kernel:
    return kernel("sampling/change_rows.cu", name, THREADS=_THREADS, LOADS=_LOADS)


def _check_ints(tokens: Tensor) -> None:
    if tokens.dtype is not torch.int32 or not tokens.is_contiguous():
        raise ValueError(f"tokens: {tokens.dtype} {tokens.stride()} is not contiguous int32")


def _check_logits(logits: Tensor) -> None:
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits: {logits.dtype} {logits.stride()} is not contiguous float32")
