"""Grouped-query attention: several query heads read one KV head. Multi-head and multi-query attention are cases."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allspan.kernels.ops import HadamardRotation, HeadNorms, KvPages
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.models.blocks.head_shares import head_shares
from allspan.worker.models.blocks.position_scores import QueryScale, alibi_slopes, query_scale_table
from allspan.worker.models.pieces import ATTENTION, Axis, Linear, Part, Piece, Vector
from allspan.worker.models.rope import RotarySpec, cos_sin_table, mean_rotated
from allspan.worker.step.backend import AttentionHeads

if TYPE_CHECKING:
    from allspan.worker.models.shard import Shard
    from allspan.worker.models.sublayer import MakeConstant, Sublayer
    from allspan.worker.program.program import Slot


@dataclass(frozen=True, slots=True)
class Gqa:
    """An AttentionBlock. Weights: qkv (q, k and v stacked), o, and with `qk_norm_eps` q_norm and k_norm."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec | None
    """None: positions do not turn queries and keys."""
    scale: float = 0.0
    """The factor of scores before the softmax; 0: 1 / √head_dim."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float = 0.0
    """With it an RMSNorm of each head of q and k, before the rotary embedding; 0: no norm."""
    norms_all_heads: bool = False
    """The norm is one of all heads of q together, and one of all of k; its weights have an element for each of them."""
    window: int = 0
    """Tokens that a query sees, its own included; 0: all."""
    soft_cap: float = 0.0
    """Scores become cap · tanh(score / cap); 0: they are not capped."""
    has_slopes: bool = False
    """ALiBi: scores fall with the distance of a key, by `alibi_slopes` of its query head."""
    has_sinks: bool = False
    """Each query head has a learned logit, weight `sinks`, that joins the softmax's denominator."""
    query_scale: QueryScale | None = None
    """What queries are multiplied with, by position."""

    @property
    def lifetime(self) -> PageLifetime:
        return PageLifetime(self.window)

    @property
    def heads(self) -> Axis:
        return Axis(self.num_heads, self.head_dim, ATTENTION)

    @property
    def kv_heads(self) -> Axis:
        return Axis(self.num_kv_heads, self.head_dim, ATTENTION, readers=self.num_heads)

    @property
    def is_latent(self) -> bool:
        return False

    @property
    def latent_sizes(self) -> None:
        return None

    @property
    def has_centers(self) -> bool:
        """Whether keys have a bias of their own that reaches the cache and that may be taken off all of them: what it
        adds to every score of a query does not show after the softmax, unless a cap or a sink lies between."""
        return self.qkv_bias and not (self.qk_norm_eps or self.soft_cap or self.has_sinks)

    def pieces(self, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
        norms: tuple[Piece, ...] = ()
        if self.qk_norm_eps:
            one_head = Axis(1, self.head_dim)
            axes = {"q": self.heads, "k": self.kv_heads} if self.norms_all_heads else {"q": one_head, "k": one_head}
            norms = tuple(
                Vector(f"{prefix}{x}_norm.weight", axis, rotary_dim=self._paired_dim) for x, axis in axes.items()
            )
        sinks = (Vector(prefix + "sinks.weight", Axis(self.num_heads, 1, ATTENTION)),) if self.has_sinks else ()
        output = Linear(prefix + "o", (Part(prefix + "o", hidden),), self.heads, self.output_bias)
        return (self._qkv(prefix, hidden), *norms, *sinks, output)

    def mix(self, sub: Sublayer, x: Slot) -> Slot:
        """New keys and values go to the cache before queries read it.

        A quantised cache gets keys rotated by a Hadamard matrix, less what a bias adds to all of them, and the
        queries are rotated alike: see `OpSet.hadamard`. One large element would take the scale from all others.
        """
        program, size = sub.program, self.head_dim
        heads, kv_heads = len(sub.shard.units(self.heads)), len(sub.shard.units(self.kv_heads))
        qkv = sub.buffer("qkv", (heads + 2 * kv_heads) * size)
        attended = sub.buffer("attended", heads * size)
        sub.linear("qkv", x, qkv)
        qkv_heads = program.view(qkv, heads + 2 * kv_heads, size)
        eps = 0.0 if self.norms_all_heads else self.qk_norm_eps
        if self.norms_all_heads:
            self._norm_all_heads(sub, qkv_heads)
        q_norm, k_norm = (sub.weight(f"{each}_norm.weight") if eps else None for each in "qk")
        tables = tuple(sub.constant("cos_sin", *table) for table in self._tables())
        if self.rotary is not None and self.rotary.is_by_prompt:
            sub.choose_tables(self.rotary.prompt_lengths)
        center = self._center(sub) if sub.quantised_cache and self.has_centers else None
        pages = KvPages(*(sub.cache(part) for part in ("k_cache", "v_cache", "k_scales", "v_scales")))
        program.op(
            "rotary_append",
            qkv_heads,
            heads,
            HeadNorms(q_norm, k_norm, eps),
            sub.rotation(tables, self._rotary_dim, self._query_scales(sub)),
            HadamardRotation(sub.quantised_cache, center),
            pages,
            sub.slots,
        )
        self.attend(sub, qkv_heads, pages, program.view(attended, heads, size))
        return attended

    def _norm_all_heads(self, sub: Sublayer, qkv: Slot) -> None:
        means, shares = sub.buffer("qk_means", 2, is_exact=True), head_shares(sub.shard, self.heads, self.kv_heads)
        key = (self.num_heads, self.num_kv_heads, self.head_dim)
        sub.program.op("mean_squares", qkv, sub.constant("qk_shares", key, lambda _: shares), means)
        if sub.shard.groups[ATTENTION].size > 1:
            sub.program.op("all_reduce", means)
        weights = (sub.weight(f"{each}_norm.weight") for each in "qk")
        sub.program.op("norm_heads", qkv, means, *weights, self.qk_norm_eps)

    def attend(self, sub: Sublayer, qkv: Slot, pages: KvPages[Slot], out: Slot) -> None:
        """Appends the attention of queries over the pages, which hold the new keys and values already; a block with
        another mask has one of its own."""
        own = self.on_rank(sub.shard)
        meta = sub.meta("attention", own, lambda context: context.attention(own))
        sinks = sub.weight("sinks.weight") if self.has_sinks else None
        sub.program.op("attention", qkv, *pages, sinks, meta, out)

    def project(self, sub: Sublayer, attended: Slot) -> None:
        sub.add_linear("o", attended)

    def on_rank(self, shard: Shard) -> AttentionHeads:
        """The heads of one rank."""
        group, own = self.num_heads // self.num_kv_heads, shard.units(self.kv_heads)
        return AttentionHeads(
            kv_head_of=tuple(head // group - own.start for head in shard.units(self.heads)),
            num_kv_heads=len(own),
            head_dim=self.head_dim,
            scale=self.scale or self.head_dim**-0.5,
            most_kv_heads=-(-self.num_kv_heads // shard.groups[ATTENTION].size),
            group=group,
            window=self.window,
            soft_cap=self.soft_cap,
            slopes=self._slopes(shard),
        )

    def _slopes(self, shard: Shard) -> tuple[float, ...] | None:
        """The slopes of the rank's query heads, by their numbers in the whole model."""
        if not self.has_slopes:
            return None
        slopes = alibi_slopes(self.num_heads)
        return tuple(slopes[head] for head in shard.units(self.heads))

    def _query_scales(self, sub: Sublayer) -> Slot | None:
        """The factors of queries by position; where the prompt's length chooses a rotary table, once for each of them,
        as positions count the rows of all tables then."""
        if (scale := self.query_scale) is None:
            return None
        rotary = self.rotary

        def table(max_positions: int) -> Tensor:
            count = 1 if rotary is None else len(rotary.prompt_lengths(max_positions)) + 1
            return query_scale_table(scale, max_positions).repeat(count)

        return sub.constant("q_scales", (scale, rotary), table)

    @property
    def _rotary_dim(self) -> int:
        return 0 if self.rotary is None else self.rotary.rotary_dim or self.head_dim

    @property
    def _paired_dim(self) -> int:
        """The elements of each head that a checkpoint may have in pairs side by side: without a rotary embedding all of
        them, since converters reorder the rows of every layer. Attention would not see it; adapters of q and k do."""
        return self._rotary_dim or self.head_dim

    def _qkv(self, prefix: str, hidden: Axis) -> Linear:
        turned = self._paired_dim
        parts = (
            Part(prefix + "q", self.heads, turned),
            Part(prefix + "k", self.kv_heads, turned),
            Part(prefix + "v", self.kv_heads),
        )
        return Linear(prefix + "qkv", parts, hidden, self.qkv_bias)

    def _tables(self) -> list[tuple[Hashable, MakeConstant]]:
        """The key and the maker of each table of cosines and sines: one, or one for each of a token's positions."""
        rotary, size = self.rotary, self.head_dim
        if rotary is None or rotary.num_positions == 1:
            return [((rotary, size), functools.partial(cos_sin_table, rotary, size))]
        axes = range(rotary.num_positions)
        return [((rotary, size, axis), functools.partial(cos_sin_table, rotary, size, axis=axis)) for axis in axes]

    def _center(self, sub: Sublayer) -> Slot:
        """What the keys' bias is on average over all positions."""
        tables = [sub.constant_name("cos_sin", key) for key, _ in self._tables()]
        qkv, holding = sub.piece("qkv"), sub.holding

        def center(tensors: Mapping[str, Tensor]) -> Tensor:
            cos_sin = functools.reduce(torch.add, (tensors[table] for table in tables))
            return mean_rotated(holding.bias(tensors, qkv, 1).view(-1, self.head_dim), cos_sin)

        return sub.derived("k_center", center)
