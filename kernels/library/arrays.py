"""What callers hand over: anything that speaks DLPack becomes a torch tensor, without a copy; and layouts."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from allspan.kernels.cuda.cache.pages import QUERIES
from allspan.kernels.cuda.jit.modules import gpu


class Array(Protocol):
    """A torch tensor, or an array of CuPy, JAX, …, in the memory of a GPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


PagedCache = Array | tuple[Array, ...]
"""FlashInfer's: [pages, 2, page_size, kv_heads, head_dim], or a pair without the second axis; HND has kv_heads before
page_size. With int8 and 4-bit pages, HND, and zeros and scales as third and fourth, see `pages.Cache`."""


def anywhere(name: str, array: Array) -> Tensor:
    """A torch tensor on any device. Raises TypeError for what does not speak DLPack."""
    if isinstance(array, Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name}: a {type(array).__name__} does not speak DLPack; give an array on the GPU")
    return from_dlpack(array)


def tensor(name: str, array: Array) -> Tensor:
    """A torch tensor on a GPU. Raises TypeError for what does not speak DLPack, ValueError for what is on no GPU,
    BackendUnavailable where kernels cannot run."""
    found = anywhere(name, array)
    try:
        gpu(found.device)
    except ValueError as error:
        raise ValueError(f"{name}: is on {found.device}; copy it to a GPU") from error
    return found


def ints(name: str, array: Array, device: torch.device) -> Tensor:
    """Contiguous int32 on the device; indices may come from the host."""
    found = array if isinstance(array, Tensor) else from_dlpack(array)
    if found.is_floating_point():
        raise ValueError(f"{name}: {found.dtype} is no type of indices; give int32")
    return found.to(device, torch.int32, non_blocking=True).contiguous()


def queries(name: str, array: Array) -> Tensor:
    """[n, heads, head_dim], heads of a row one after the other."""
    x = tensor(name, array)
    if x.dtype not in QUERIES:
        raise ValueError(f"{name}: {x.dtype} is not float16 or bfloat16; convert it with .to(torch.bfloat16)")
    if x.stride(-1) != 1 or x.stride(-2) != x.shape[-1] or x.stride(0) % 8 or x.data_ptr() % 16:
        return x.contiguous()
    return x


def check_layout(layout: str) -> None:
    if layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: {layout!r} is not 'NHD' or 'HND'")


def keys_and_values(k: Array, v: Array, layout: str) -> tuple[Tensor, Tensor]:
    """[tokens, kv_heads, head_dim], in strides that both have."""
    check_layout(layout)
    pair = tensor("k", k), tensor("v", v)
    if layout == "HND":
        pair = pair[0].transpose(0, 1), pair[1].transpose(0, 1)
    return _alike(*pair)


def pages(cache: PagedCache, layout: str) -> tuple[Tensor, ...]:
    """Returns what `pages.Cache` holds: keys, values, and zeros and scales where there are some."""
    if isinstance(cache, (tuple, list)):
        keys, values, *scales = (tensor("paged_kv_cache", part) for part in cache)
    else:
        both = tensor("paged_kv_cache", cache)
        if both.ndim != 5 or both.shape[1] != 2:
            raise ValueError(f"paged_kv_cache: {tuple(both.shape)} is not [pages, 2, …]; or give keys and values")
        keys, values, scales = both[:, 0], both[:, 1], []
    if layout == "NHD":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if keys.ndim != 4:
        raise ValueError(f"paged_kv_cache: keys {tuple(keys.shape)} have no 4 axes")
    return keys, values, *scales


def latent_pages(ckv: Array, kpe: Array | None, sizes: tuple[int, int]) -> Tensor:
    """Returns [pages, 1, page_size, latent + turned]: ckv alone, in that shape or [pages, page_size, latent + turned],
    or what ckv [pages, page_size, latent] and kpe [pages, page_size, turned] are the two views of. Raises ValueError
    for others."""
    latent, turned = sizes
    width, cache = latent + turned, anywhere("ckv_cache", ckv)
    if kpe is None:
        joined = cache.unsqueeze(1) if cache.ndim == 3 else cache
        if joined.ndim != 4 or joined.shape[1] != 1 or joined.shape[3] != width:
            wanted = f"[pages, page_size, {width}], a latent of {latent} and {turned} that turn in one row"
            raise ValueError(f"ckv_cache: {tuple(cache.shape)} is not {wanted}; or give kpe_cache, too")
        return joined
    other = anywhere("kpe_cache", kpe)
    for name, part, size in (("ckv_cache", cache, latent), ("kpe_cache", other, turned)):
        if part.ndim != 3 or part.shape[2] != size or part.shape[:2] != cache.shape[:2]:
            raise ValueError(f"{name}: {tuple(part.shape)} is not [pages, page_size, {size}]")
    gap = other.data_ptr() - cache.data_ptr()
    are_alike = cache.dtype is other.dtype and cache.stride() == other.stride() and cache.stride(2) == 1
    is_one = cache.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    if not (are_alike and is_one and gap == latent * cache.element_size()):
        raise ValueError(
            f"kpe_cache: its rows do not lie behind those of ckv_cache; make one cache [pages, page_size, {width}] and "
            f"give its views [..., :{latent}] and [..., {latent}:], or the cache as ckv_cache and None"
        )
    page, token, _ = cache.stride()
    return cache.as_strided((*cache.shape[:1], 1, cache.shape[1], width), (page, page, token, 1))


def latent_scales(scales: Array | None, cache: Tensor) -> Tensor | None:
    """Returns float32 [pages, 1, 2, page_size] for pages of int8 and float8_e4m3fn, None for others. Raises ValueError
    where they are missing, not wanted or of other sizes."""
    if cache.is_floating_point() and cache.dtype is not torch.float8_e4m3fn:
        if scales is not None:
            raise ValueError(f"scales: pages of {cache.dtype} have none")
        return None
    wanted = (len(cache), 1, 2, cache.shape[2])
    found = None if scales is None else anywhere("scales", scales)
    if found is None or found.dtype is not torch.float32 or found.shape != wanted:
        given = "none are given" if found is None else f"{found.dtype} {tuple(found.shape)} is given"
        raise ValueError(f"scales: pages of {cache.dtype} have float32 {wanted}, zeros and scales; {given}")
    return found


def _alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if k.shape == v.shape and (k.stride() != v.stride() or k.stride(-1) != 1):
        return k.contiguous(), v.contiguous()
    return k, v


def outputs(q: Tensor, out: Array | None, lse: Array | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """The caller's, or new ones."""
    into = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else tensor("out", out)
    if lse is not None:
        return into, tensor("lse", lse)
    return into, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
