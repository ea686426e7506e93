"""Drawing tokens: sample_rows.cu, whose filters are temperature, top-k, top-p of what is left, min-p.

Filters are thresholds: tokens that are equally likely stay or go together, so top-k may keep more than k. One seed for
each row comes from torch's generator (or `seed` and `offset`); equal seeds draw equal tokens, whatever the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.abi.sampling import SETTINGS
from allspan.kernels.cuda.sampling.sample_rows import Wanted, sample_rows
from allspan.kernels.cuda.sampling.workspace import SamplingWorkspace, sampling_workspace
from allspan.kernels.library.arrays import Array, ints, tensor

Share = float | Array
Count = int | Array

_MOST_KEPT = 8
_kept: OrderedDict[tuple[Any, ...], SamplingWorkspace] = OrderedDict()


def softmax(
    logits: Array,
    workspace_buffer: Array | None = None,
    temperature: Share | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """softmax(logits / temperature), float32 [rows, vocabulary]; temperature: a number, or one for each row."""
    x = tensor("logits", logits).float()
    by = 1.0 if temperature is None else temperature
    return torch.softmax(x / (by if isinstance(by, (int, float)) else tensor("temperature", by)[:, None]), -1)


def sampling_from_logits(logits: Array, indices: Array | None = None, **options: Any) -> Tensor:
    """A token for each row of logits [rows, vocabulary], int32; or, with indices int32 [n], for each of those rows.

    options: generator, or seed and offset; deterministic, which it always is; check_nan: raises ValueError for a NaN,
    after a look at the host. A row with a NaN or +inf gives -1, one of -inf alone -2.
    """
    return _draw(tensor("logits", logits), {}, indices, options)


def sampling_from_probs(probs: Array, indices: Array | None = None, **options: Any) -> Tensor:
    """`sampling_from_logits` from probabilities, which need not sum to 1."""
    return _draw(_logarithms(probs), {}, indices, options)


def top_k_sampling_from_probs(probs: Array, top_k: Count, indices: Array | None = None, **options: Any) -> Tensor:
    """Among the top_k most likely; top_k: a number, or one for each token drawn. 0, or as many as there are: all."""
    return _draw(_logarithms(probs), {"top_k": top_k}, indices, options)


def top_p_sampling_from_probs(probs: Array, top_p: Share, indices: Array | None = None, **options: Any) -> Tensor:
    """Among the fewest most likely ones whose probabilities reach top_p."""
    return _draw(_logarithms(probs), {"top_p": top_p}, indices, options)


def min_p_sampling_from_probs(probs: Array, min_p: Share, indices: Array | None = None, **options: Any) -> Tensor:
    """Among those with at least min_p times the probability of the most likely one."""
    return _draw(_logarithms(probs), {"min_p": min_p}, indices, options)


def top_k_top_p_sampling_from_logits(
    logits: Array, top_k: Count, top_p: Share, indices: Array | None = None, **options: Any
) -> Tensor:
    """top_k, then top_p of the probabilities that the rest has: filter_apply_order="top_k_first", the default."""
    _check_order(options)
    return _draw(tensor("logits", logits), {"top_k": top_k, "top_p": top_p}, indices, options)


def top_k_top_p_sampling_from_probs(
    probs: Array, top_k: Count, top_p: Share, indices: Array | None = None, **options: Any
) -> Tensor:
    """`top_k_top_p_sampling_from_logits` from probabilities."""
    _check_order(options)
    return _draw(_logarithms(probs), {"top_k": top_k, "top_p": top_p}, indices, options)


def _check_order(options: dict[str, Any]) -> None:
    order = options.pop("filter_apply_order", "top_k_first")
    if order != "top_k_first":
        raise ValueError(f"filter_apply_order: {order!r} is not known; 'top_k_first' is")


def _logarithms(probs: Array) -> Tensor:
    return tensor("probs", probs).float().log()


def _draw(logits: Tensor, filters: dict[str, Any], indices: Array | None, options: dict[str, Any]) -> Tensor:
    known = {"deterministic", "generator", "check_nan", "seed", "offset"}
    if strange := sorted(set(options) - known):
        raise TypeError(f"{strange[0]}: there is no such argument (there are {', '.join(sorted(known))})")
    if options.get("check_nan") and bool(logits.isnan().any()):
        raise ValueError("check_nan: there is a NaN")
    x = logits.float().contiguous()
    if indices is not None:
        x = x[ints("indices", indices, x.device).long()]
    count, vocab = x.shape
    rows = torch.arange(count, dtype=torch.int32, device=x.device)
    out = torch.empty(count, dtype=torch.int32, device=x.device)
    offset = options.get("offset") or 0
    positions = rows if options.get("seed") is None else rows + _whole("offset", offset, x.device)
    settings = _settings(count, x.device, filters, options)
    sample_rows(x, Wanted(rows, positions), settings, out, _workspace(count, vocab, x.device))
    return out


def _whole(name: str, value: Any, device: torch.device) -> Any:
    return value if isinstance(value, int) else ints(name, value, device)


def _settings(count: int, device: torch.device, filters: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """The kernels' table of settings, made on the GPU: see `SETTINGS` in kernels/abi/sampling.py."""
    words = torch.zeros(count, SETTINGS.itemsize // 8, dtype=torch.int64, device=device)
    reals, floats, numbers = words.view(torch.float64), words.view(torch.float32), words.view(torch.int32)
    if (seed := options.get("seed")) is None:
        words[:, 0] = torch.randint(2**62, (count,), generator=options.get("generator"), device=device)
    else:
        words[:, 0] = seed if isinstance(seed, int) else tensor("seed", seed)
    reals[:, 1] = _number("top_p", filters.get("top_p", 1.0))
    reals[:, 2] = 1.0  # typical_p
    floats[:, 6] = 1.0  # temperature
    min_p = _number("min_p", filters.get("min_p", 0.0))
    floats[:, 7] = torch.as_tensor(min_p, dtype=torch.float32, device=device).log()
    numbers[:, 8] = _number("top_k", filters.get("top_k", 0))
    numbers[:, 9] = 1  # random
    return words.view(torch.uint8)


def _number(name: str, value: Any) -> Any:
    return value if isinstance(value, (int, float)) else tensor(name, value)


def _workspace(rows: int, vocab: int, device: torch.device) -> SamplingWorkspace:
    """Kept for each stream, of which the last ones: it is large, and must begin as zeros."""
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():
        return sampling_workspace(rows, vocab, device)  # the graph's own
    key = (device, vocab, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0)
    found = _kept.pop(key, None)
    if found is None or found.rows < rows:
        found = sampling_workspace(rows, vocab, device)
    _kept[key] = found
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return found
