"""Writing keys and values into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.cuda.rows.rotary_append import append_kv
from allspan.kernels.library.arrays import Array, PagedCache, check_layout, ints, pages, queries, tensor
from allspan.kernels.library.requests import lengths_of


def get_seq_lens(kv_indptr: Array, kv_last_page_len: Array, page_size: int) -> Tensor:
    """Tokens of each request, int32 [requests]."""
    indptr = tensor("kv_indptr", kv_indptr)
    return lengths_of(indptr, ints("kv_last_page_len", kv_last_page_len, indptr.device), page_size)


def get_batch_indices_positions(
    append_indptr: Array,
    seq_lens: Array,
    nnz: int,
    batch_indices: Array | None = None,
    positions: Array | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the request of each of nnz rows and the row's position in it, int32 [nnz]; -1 for rows of no request.

    Request r has the rows append_indptr[r] … append_indptr[r + 1] - 1, the last of its seq_lens[r] tokens.
    """
    indptr = tensor("append_indptr", append_indptr)
    lengths = ints("seq_lens", seq_lens, indptr.device)
    rows = torch.arange(nnz, dtype=torch.int32, device=indptr.device)
    request = (torch.searchsorted(indptr, rows, right=True) - 1).clamp(max=len(lengths) - 1)
    place = (lengths[request] - indptr[request + 1] + rows).int()
    is_there = rows < indptr[-1]
    found = [torch.where(is_there, x, -1).int() for x in (request, place)]
    for i, into in enumerate((batch_indices, positions)):
        if into is not None:
            found[i] = tensor("batch_indices, positions", into).copy_(found[i])
    return found[0], found[1]


def append_paged_kv_cache(
    append_key: Array,
    append_value: Array,
    batch_indices: Array,
    positions: Array,
    paged_kv_cache: PagedCache,
    kv_indices: Array,
    kv_indptr: Array,
    *rest: Array | str,
    **layout: str,
) -> None:
    """Writes row i of append_key and append_value [nnz, kv_heads, head_dim] to the place positions[i] of request
    batch_indices[i], -1: nowhere. `rest`: kv_last_page_len, which nothing depends on, and kv_layout, also by its name.

    Pages of the rows' dtype, of float8_e4m3fn (values beyond ±448 become that), or of int8 or 4 bits, which are
    quantised for each token and head. Raises ValueError for what does not fit.
    """
    layout.pop("kv_last_page_len", None)
    kv_layout = layout.pop("kv_layout", rest[1] if len(rest) > 1 else "NHD")
    if layout or len(rest) > 2 or not isinstance(kv_layout, str):
        raise TypeError(f"append_paged_kv_cache: {[*layout, *rest[2:]]} are too many arguments")
    check_layout(kv_layout)
    k, v = queries("append_key", append_key), queries("append_value", append_value)
    keys, values, *scales = pages(paged_kv_cache, kv_layout)
    page_size, device = keys.shape[2], k.device
    request, place = ints("batch_indices", batch_indices, device), ints("positions", positions, device)
    indptr, indices = ints("kv_indptr", kv_indptr, device), ints("kv_indices", kv_indices, device)
    is_there = (request >= 0) & (place >= 0)
    at = torch.where(is_there, indptr[request] + place // page_size, 0)
    slots = torch.where(is_there, indices[at] * page_size + place % page_size, -1).int()
    k_scales, v_scales = scales or (None, None)
    append_kv(k, v, keys, values, k_scales, v_scales, slots)
