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


def tensor(name: str, array: Array) -> Tensor:
    """Raises TypeError for what does not speak DLPack, ValueError for what is on no GPU, BackendUnavailable where
    kernels cannot run."""
    if not isinstance(array, Tensor):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name}: a {type(array).__name__} does not speak DLPack; give an array on the GPU")
        array = from_dlpack(array)
    try:
        gpu(array.device)
    except ValueError as error:
        raise ValueError(f"{name}: is on {array.device}; copy it to a GPU") from error
    return array


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
