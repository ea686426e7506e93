"""The requests of a batch wrapper: FlashInfer's page tables as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allspan.kernels.cuda.cache.pages import KV, PageTable, dense, dense_table
from allspan.kernels.library.arrays import Array, ints


def lengths_of(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """Tokens of each request, int32: page_size · (pages - 1) + last_page_len, or 0 without pages."""
    pages = indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).int()


class PageBuffers:
    """Where plans put their tables: new tensors each time, or, for captured graphs, always the same ones."""

    def __init__(self, device: torch.device, buffers: Sequence[Array | None] | None) -> None:
        """buffers, for graphs: int32 indptr [requests + 1], indices [most pages] and last_page_len [requests]."""
        self.device = device
        self.fixed: tuple[Tensor, Tensor, Tensor] | None = None
        if buffers is not None:
            names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
            given = []
            for name, buffer in zip(names, buffers, strict=True):
                if buffer is None:
                    raise ValueError(f"{name}: use_cuda_graph needs it; give int32 on the GPU")
                given.append(held := ints(name, buffer, device))
                if isinstance(buffer, Tensor) and held.data_ptr() != buffer.data_ptr():
                    raise ValueError(f"{name}: {buffer.dtype} on {buffer.device} is not contiguous int32 on {device}")
            self.fixed = given[0], given[1], torch.zeros_like(given[2])

    def table(self, tables: tuple[Array, Array, Array], page_size: int) -> PageTable:
        """Returns the page table of indptr, indices and last_page_len. Raises ValueError if buffers are too small."""
        names = ("indptr", "indices", "last_page_len")
        indptr, indices, last = (ints(n, x, self.device) for n, x in zip(names, tables, strict=True))
        if len(indptr) != len(last) + 1:
            raise ValueError(f"indptr: {len(indptr)} of them do not go with {len(last)} last_page_len")
        lengths = lengths_of(indptr, last, page_size)
        if self.fixed is None:
            return PageTable(indptr, indices, lengths)
        if len(indptr) != len(self.fixed[0]) or len(indices) > len(self.fixed[1]):
            made_for = f"{len(self.fixed[2])} requests and up to {len(self.fixed[1])} pages"
            raise ValueError(f"indptr: {len(last)} requests, {len(indices)} pages; the buffers are for {made_for}")
        for buffer, found in zip(self.fixed, (indptr, indices, lengths), strict=True):
            buffer[: len(found)].copy_(found)
        return PageTable(*self.fixed)


@dataclass
class Gathered:
    """Pages of all requests as ragged keys and values, for what needs other keys than the pages hold (rotary). Costs
    a copy of what is read, at each call, and one look at lengths on the host."""

    table: PageTable
    page_size: int
    _places: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False)

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the page of each token, its offset in the page and its position in its request."""
        if self._places is None:
            lengths = self.table.kv_lens.long()
            request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
            position = torch.arange(len(request), device=lengths.device) - (lengths.cumsum(0) - lengths)[request]
            page = self.table.indices[self.table.indptr[request].long() + position // self.page_size]
            self._places = page.long(), position % self.page_size, position
        return self._places

    def dense(self, keys: Tensor, values: Tensor) -> tuple[KV, PageTable]:
        """Returns keys and values [tokens, kv_heads, head_dim], in the order of the requests, as one page each."""
        lengths = self.table.kv_lens
        return dense(keys, values), dense_table((lengths.cumsum(0) - lengths).int(), lengths)
