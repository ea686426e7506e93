"""The engine's attention over latents on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.cuda.attention.attention import StepAttention
from allspan.kernels.cuda.attention.prefill import PrefillPlan
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.latent import expand, products
from allspan.kernels.cuda.latent.append import latent_append
from allspan.kernels.cuda.latent.attend.attend import Mode, Queries, cutting, latent_attend
from allspan.kernels.latent_tensors import LatentPages, LatentRooms, LatentWeights, NewLatents
from allspan.kernels.ops import Rotation

MOST_MERGED_BEHIND = 2
"""Decodes of a step, at most, whose parts the product behind attention merges, in every one of its blocks; of more,
Hopper's kernel for few heads does. On an H200 both products and attention over 16 heads took one or the other way 12.7
or 16.2 µs for 1 request of 1,024 tokens, 19.5 or 24.2 for one of 8,192, 36.6 or 51.6 for one of 32,768, and 33.6 or
25.5 for 8 of 1,024. With other kernels neither was timed, and the product merges."""


def latent_attention(
    q: Tensor,
    weights: LatentWeights[Tensor],
    cache: Tensor,
    scales: Tensor | None,
    meta: StepAttention,
    absorbed: Tensor,
    mixed: Tensor,
    out: Tensor,
) -> None:
    """See `OpSet.latent_attention`; all of 16 bits. Keys and values are made for requests of many new tokens; what
    others see stays latents. Rows of `out` that no request has hold anything."""
    if meta.decodes is not None or meta.prefills is not None:
        _Step(q, weights, (cache, scales), meta, absorbed, mixed, out).attend(meta.decodes, meta.prefills)
    if meta.expanded is not None:  # behind, as the products there write all rows
        expand.attend_expanded(q, weights, (cache, scales), meta.expanded, meta.scores.scale, out)


def append_and_attend(
    q: Tensor,
    new: NewLatents[Tensor],
    rotation: Rotation[Tensor],
    weights: LatentWeights[Tensor],
    pages: LatentPages[Tensor],
    meta: StepAttention,
    rooms: LatentRooms[Tensor],
    out: Tensor,
) -> None:
    """See `FusedOps.append_and_attend`. Of a few decodes alone the first product of attention appends, too."""
    step = _Step(q, weights, pages, meta, *rooms, out)
    if rotation.q_scales is None and step.is_of_few_decodes(len(q)):
        step.attend_few(new, rotation)
        return
    latent_append(q, new.kv, new.weight, new.eps, rotation, *pages, new.slots)
    latent_attention(q, weights, *pages, meta, *rooms, out)


class _Step:
    def __init__(
        self,
        q: Tensor,
        weights: LatentWeights[Tensor],
        pages: tuple[Tensor, Tensor | None],
        meta: StepAttention,
        absorbed: Tensor,
        mixed: Tensor,
        out: Tensor,
    ) -> None:
        latent, self._key = weights.k_up.shape[1:]
        shape = *q.shape[:2], latent
        self._q, self._weights, self._pages, self._meta, self._out = q, weights, pages, meta, out
        self._turned = q[..., self._key :]
        self._queries, self._sums = (
            absorbed.flatten()[: q.numel() // q.shape[2] * latent].view(shape),
            mixed.view(shape),
        )

    def is_of_few_decodes(self, rows: int) -> bool:
        """Whether this is a step of so many decodes and nothing else, whose products have kernels of their own."""
        decodes = self._meta.decodes
        if self._meta.prefills is not None or decodes is None or decodes.rows is not None:
            return False
        return len(decodes.kv_lens) == rows and products.runs(self._q[:rows], self._weights)

    def attend_few(self, new: NewLatents[Tensor] | None, rotation: Rotation[Tensor] | None) -> None:
        """Attends where the step `is_of_few_decodes`; new: latents that are still to be appended, None if they are."""
        decodes = self._meta.decodes
        assert decodes is not None
        rows = len(decodes.kv_lens)
        if new is None or rotation is None:
            products.absorb(self._q[:rows], self._weights, self._queries[:rows])
        else:
            products.absorb_and_append(self._q, new, rotation, self._weights, self._pages, self._queries)
        cut = cutting(Queries(self._queries, self._turned), self._pages[0], None)
        merges = cut.is_for_few_heads and rows > MOST_MERGED_BEHIND
        self._attend_latents(decodes, None, Mode(merges=merges, cutting=cut))
        parts = None if merges else (decodes, self._meta.workspace, cut)
        products.values(self._sums[:rows], self._weights, self._out[:rows], parts)

    def attend(self, decodes: PageTable | None, tiled: tuple[PageTable, PrefillPlan] | None) -> None:
        rows = len(self._q) if tiled or decodes is None else len(decodes.kv_lens)
        if tiled is None and self.is_of_few_decodes(rows):
            self.attend_few(None, None)
            return
        self._absorb(rows)
        self._attend_latents(decodes, tiled, Mode())
        self._values(rows)

    def _absorb(self, rows: int) -> None:
        q, out = self._q[:rows, :, : self._key].transpose(0, 1), self._queries[:rows].transpose(0, 1)
        torch.bmm(q, self._weights.k_up.transpose(1, 2), out=out)

    def _values(self, rows: int) -> None:
        sums, out = self._sums[:rows].transpose(0, 1), self._out[:rows].transpose(0, 1)
        torch.bmm(sums, self._weights.v_up.transpose(1, 2), out=out)

    def _attend_latents(
        self, decodes: PageTable | None, tiled: tuple[PageTable, PrefillPlan] | None, mode: Mode
    ) -> None:
        scale, workspace, turned = self._meta.scores.scale, self._meta.workspace, self._turned
        if decodes is not None:
            count = len(decodes.kv_lens)
            some = Queries(self._queries[:count], turned[:count])
            latent_attend(some, self._pages, decodes, None, scale, (self._sums[:count], None), workspace, mode)
        if tiled is not None:
            table, plan = tiled
            every = Queries(self._queries, turned)
            latent_attend(every, self._pages, table, plan, scale, (self._sums, None), workspace, mode)
