"""Attention of many new tokens over latents on a GPU: keys and values of all that they see are made, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.prefill import PrefillPlan, attend
from allspan.kernels.cuda.attention.prefill_sm90 import CAPABILITY
from allspan.kernels.cuda.cache.pages import KV, PLAIN, PageTable, Scores
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.latent.append import PAGES
from allspan.kernels.cuda.latent.expand_rule import ExpandRule
from allspan.kernels.cuda.rows.arguments import TYPES
from allspan.kernels.latent_tensors import LatentWeights

_SIZES = (192, 128)
"""Elements of a key and of a value that Hopper's kernel is made for."""
_MOST_SIZE, _STEP = 256, 16
_ROWS, _THREADS, _SLOTS, _REST = 128, 384, 3, 1024 + 256
_WHOLE = 1 << 30  # tokens of a page that nothing outgrows


def runs(sizes: tuple[int, int]) -> bool:
    """Whether there are kernels for keys and values of so many elements."""
    return sizes[1] <= sizes[0] <= _MOST_SIZE and sizes[0] % _STEP == 0


@dataclass(frozen=True, slots=True)
class ExpandRoom:
    """Where keys and values lie: of one layer at a time, and of as many heads as there is room for."""

    latents: Tensor
    """[tokens, L], of 16 bits."""
    made: Tensor
    """[elements]: the key of a token and head, and its value behind it."""
    numbers: Tensor
    """int32: 0, 1, … up to any number of tokens or heads."""

    def heads_at_once(self, heads: int, tokens: int, width: int) -> int:
        """Returns how many of so many heads there is room for, with `width` elements of each of so many tokens."""
        return max(1, min(heads, len(self.made) // max(1, tokens * width)))


def expand_room(rule: ExpandRule, device: torch.device | str) -> ExpandRoom:
    """For all that the rule may choose."""
    sizes = rule.sizes.key + rule.sizes.rot, rule.sizes.value
    latents, made, numbers = _room(rule, _is_for_hopper(sizes, torch.device(device)))
    return ExpandRoom(
        torch.empty(latents, dtype=torch.bfloat16, device=device),
        torch.empty(made, dtype=torch.bfloat16, device=device),
        torch.arange(numbers, dtype=torch.int32, device=device),
    )


def room_bytes(rule: ExpandRule) -> int:
    """Returns what `expand_room` takes on a GPU, at most: where Hopper's kernel runs it is less."""
    (tokens, latent), (made,), numbers = _room(rule, on_hopper=False)
    return (tokens * latent + made) * 2 + numbers * 4


def _room(rule: ExpandRule, on_hopper: bool) -> tuple[tuple[int, int], tuple[int], int]:
    """The shapes of ExpandRoom's tensors, and the length of `numbers`."""
    key, value = rule.sizes.key + rule.sizes.rot, rule.sizes.value
    width = key + (value if on_hopper else key)
    return (rule.most, rule.sizes.latent), (rule.at_once * width,), max(rule.most, rule.heads) + 1


@dataclass(frozen=True, slots=True)
class Expanded:
    """The requests of a step whose keys and values are made: those that have tiles in the plan."""

    table: PageTable
    plan: PrefillPlan
    indptr: Tensor
    """int32 [requests + 1]: where each one's keys begin, of all its tokens; others have none."""
    rows: int
    """Tokens of all of them, or more."""
    room: ExpandRoom


def attend_expanded(
    q: Tensor,
    weights: LatentWeights[Tensor],
    pages: tuple[Tensor, Tensor | None],
    step: Expanded,
    scale: float,
    out: Tensor,
) -> None:
    """out[i, h] = causal attention of query i of the requests of `step`; of other rows out stays as it is."""
    heads, size = q.shape[1:]
    value, latent = weights.v_up.shape[1:]
    key, rows, room = weights.k_up.shape[2], step.rows, step.room
    on_hopper = _is_for_hopper((size, value), q.device)
    width = size + (value if on_hopper else size)
    some = room.heads_at_once(heads, rows, width)
    latents = room.latents[:rows].view(q.dtype)
    made = room.made[: some * rows * width].view(q.dtype).view(some, rows, width)
    if size + value < width:
        made[..., size + value :] = 0
    _gather(pages, step, latents, made[..., key:size])
    into = out
    if not on_hopper and size != value:
        into = torch.empty_like(q)
        into[..., :value] = out
    begins = step.indptr[:-1]
    for first in range(0, heads, some):
        own, part = made[: heads - first], slice(first, first + some)
        spread = latents.expand(len(own), rows, latent)
        torch.bmm(spread, weights.k_up[part], out=own[..., :key])
        torch.bmm(spread, weights.v_up[part].transpose(1, 2), out=own[..., size : size + value])
        strides = (width * 2, own.stride(0) * 2, width * 2)
        kv = KV((own, own[..., size:], None, None), strides, len(own), _WHOLE, 0)
        heads_of = room.numbers[first : first + len(own) + 1]
        table = PageTable(room.numbers[: len(step.indptr)], begins, step.table.kv_lens, first_heads=heads_of)
        if on_hopper:
            _attend_sm90(q, kv, table, step.plan, Scores(scale), into)
        else:
            attend(q, kv, table, step.plan, Scores(scale), True, (into, None))
    if into is not out:
        out.copy_(into[..., :value])


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """See variants.py."""
    for dtype in HALVES:
        if capability == CAPABILITY:
            yield _kernel_sm90(element_macro(dtype))
    for dtype in (*HALVES, *PAGES):
        yield kernel("latent/expand.cu", "latent_rows", FORMAT=TYPES[dtype], **element_macro(dtype))


def _is_for_hopper(sizes: tuple[int, int], device: torch.device) -> bool:
    return sizes == _SIZES and gpu(device).capability == CAPABILITY


def _gather(pages: tuple[Tensor, Tensor | None], step: Expanded, latents: Tensor, turned: Tensor) -> None:
    """Writes latents [rows, L], and what turns to turned [heads, rows, rot] for each of the heads."""
    cache, scales = pages
    heads, rows, rot = turned.shape
    arguments = [
        cache, scales, np.int64(cache.stride(0)), np.int64(cache.stride(2)), np.int32(cache.shape[2].bit_length() - 1),
        step.indptr, step.table.indptr, step.table.indices, np.int32(len(step.table.kv_lens)),
        np.int32(latents.shape[1]), np.int32(rot), np.int32(heads), np.int64(turned.stride(0)),
        np.int32(turned.stride(1)), latents, turned,
    ]  # fmt: skip
    function = kernel("latent/expand.cu", "latent_rows", FORMAT=TYPES[cache.dtype], **element_macro(latents.dtype))
    launch(function, (rows,), 128, arguments, 0, True)


def _attend_sm90(q: Tensor, kv: KV, table: PageTable, plan: PrefillPlan, scores: Scores, out: Tensor) -> None:
    tiles, heads, kv_heads = len(plan.tiles), out.shape[1], kv.heads
    arguments = [
        q, np.int64(q.stride(0)), *kv.tensors[:2], *map(np.int64, kv.strides), plan.tiles, plan.qo_indptr,
        table.indptr, table.indices, table.kv_lens, table.first_heads, out, None, np.int32(1), np.int32(len(q)),
        np.int32(heads), np.int32(kv_heads), np.int32(kv_heads), np.int32(tiles), np.int32(_WHOLE.bit_length() - 1),
        np.int32(True), *scores.arguments(), None, None, None,
    ]  # fmt: skip
    blocks = min(tiles * kv_heads, gpu(q.device).multiprocessors)
    shared = (1 + _SLOTS) * _ROWS * _SIZES[0] * 2 + _REST
    launch(_kernel_sm90(element_macro(q.dtype)), (blocks,), _THREADS, arguments, shared)


def _kernel_sm90(kind: dict[str, int]) -> Kernel:
    sizes = {"HEAD_DIM": _SIZES[0], "VALUE_DIM": _SIZES[1]}
    return kernel("attention/prefill_sm90.cu", "prefill_sm90", **sizes, PARTIAL=0, **PLAIN, **kind)
