"""Writing keys and values into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.cuda.rows.rotary_append import append_kv
from allspan.kernels.library.arrays import (
    Array,
    PagedCache,
    anywhere,
    check_layout,
    ints,
    latent_pages,
    latent_scales,
    pages,
    queries,
    tensor,
)  # fmt: skip
from allspan.kernels.library.requests import lengths_of
from allspan.kernels.reference.attention import append_rows


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
    slots = _slots((batch_indices, positions, kv_indptr, kv_indices), keys.shape[2], k.device)
    k_scales, v_scales = scales or (None, None)
    append_kv(k, v, keys, values, k_scales, v_scales, slots)


def append_paged_mla_kv_cache(
    append_ckv: Array,
    append_kpe: Array,
    batch_indices: Array,
    positions: Array,
    ckv_cache: Array,
    kpe_cache: Array | None,
    kv_indices: Array,
    *rest: Array | None,
    **options: Array | None,
) -> None:
    """Writes row i of append_ckv [nnz, latent] and append_kpe [nnz, turned] as `append_paged_kv_cache` does, to the
    caches of `BatchMLAPagedAttentionWrapper.run`, also of int8 and float8_e4m3fn; on a CPU or a GPU, for which it
    waits. rest, or by name: kv_indptr, and kv_last_page_len, which nothing depends on. By name: scales.

    Raises ValueError for what does not fit, TypeError for unknown arguments and without kv_indptr."""
    given = dict(zip(("kv_indptr", "kv_last_page_len"), rest, strict=False)) | options
    indptr, scales = given.pop("kv_indptr", None), given.pop("scales", None)
    strange = sorted(set(given) - {"kv_last_page_len"})
    if strange or len(rest) > 2:
        raise TypeError(f"append_paged_mla_kv_cache: there is no argument {strange[0] if strange else rest[-1]!r}")
    if indptr is None:
        raise TypeError("append_paged_mla_kv_cache: kv_indptr is wanted")
    latents, turned = anywhere("append_ckv", append_ckv), anywhere("append_kpe", append_kpe)
    for name, x in (("append_ckv", latents), ("append_kpe", turned)):
        if x.ndim != 2 or len(x) != len(latents):
            raise ValueError(f"{name}: {tuple(x.shape)} is not [{len(latents)} rows, elements]")
    cache = latent_pages(ckv_cache, kpe_cache, (latents.shape[1], turned.shape[1]))
    where, page_size = (batch_indices, positions, indptr, kv_indices), cache.shape[2]
    _check_places(where, page_size, len(latents), len(cache))
    slots = _slots(where, page_size, cache.device)
    rows, is_there = torch.cat((latents, turned), 1)[:, None], slots >= 0
    append_rows(rows[is_there], cache, latent_scales(scales, cache), slots[is_there])


def _check_places(where: tuple[Array, Array, Array, Array], page_size: int, num_rows: int, num_pages: int) -> None:
    """Raises ValueError for places that their requests, or the cache of `num_pages`, do not have: nothing may be
    written to another request's pages. See `_slots`."""
    names = ("batch_indices", "positions", "kv_indptr", "kv_indices")
    given = [anywhere(name, x) for name, x in zip(names, where, strict=True)]
    request, place, indptr, indices = (
        ints(name, x, x.device).cpu().long() for name, x in zip(names, given, strict=True)
    )
    for name, x in zip(names[:2], (request, place), strict=True):
        if x.shape != (num_rows,):
            raise ValueError(f"{name}: {tuple(x.shape)} is not [{num_rows}], one of each row")
    is_there = (request >= 0) & (place >= 0)
    if (is_there & (request >= len(indptr) - 1)).any():
        raise ValueError(f"batch_indices: {int(request.max())} is no request of the {len(indptr) - 1} of kv_indptr")
    ends, held = indptr[1:], indptr.diff() * page_size
    if (indptr < 0).any() or (held < 0).any() or (ends > len(indices)).any():
        raise ValueError(f"kv_indptr: {indptr.tolist()} does not ascend within the {len(indices)} of kv_indices")
    if (wrong := is_there & (place >= held[request])).any():
        row = int(wrong.int().argmax())
        raise ValueError(
            f"positions: row {row} has place {int(place[row])} of request {int(request[row])}, whose pages are for "
            f"{int(held[request[row]])} tokens"
        )
    used = indices[int(indptr[0]) : int(indptr[-1])]
    if ((used < 0) | (used >= num_pages)).any():
        raise ValueError(f"kv_indices: must be in 0 to {num_pages - 1}, the pages of the cache")


def _slots(where: tuple[Array, Array, Array, Array], page_size: int, device: torch.device) -> Tensor:
    """int32 [nnz]: page · page_size + offset of each row, -1: none. where: requests, positions, kv_indptr and
    kv_indices."""
    names = ("batch_indices", "positions", "kv_indptr", "kv_indices")
    request, place, indptr, indices = (ints(name, x, device) for name, x in zip(names, where, strict=True))
    is_there = (request >= 0) & (place >= 0)
    at = torch.where(is_there, indptr[request] + place // page_size, 0)
    return torch.where(is_there, indices[at] * page_size + place % page_size, -1).int()
