"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): every head makes its keys and values of one latent a
token, which is all that the cache holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allspan.kernels.latent_tensors import LatentSizes, LatentWeights
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.models.pieces import ATTENTION, Axis, Linear, Part, Piece, Vector
from allspan.worker.models.rope import RotarySpec, cos_sin_table
from allspan.worker.step.backend import AttentionHeads

if TYPE_CHECKING:
    from allspan.worker.models.shard import Shard
    from allspan.worker.models.sublayer import Sublayer
    from allspan.worker.program.program import Slot

_EPSILON = 1e-6
"""What the norms within the block add to mean squares, whatever the model's other norms have."""


@dataclass(frozen=True, slots=True)
class Mla:
    """An AttentionBlock. Weights: qkv_a (q, or with `q_rank` q_a, and kv_a stacked), kv_a_norm, kv_b and o, and with
    `q_rank` q_a_norm and q_b. Ranks share out the heads; every rank has the whole latents, and kv_a and q_a."""

    num_heads: int
    q_rank: int
    """Elements of what queries are made of; 0: they are made of the hidden state."""
    kv_rank: int
    """Elements of a latent."""
    key_dim: int
    """Elements of a head's keys that do not turn."""
    rotary_dim: int
    """Elements of a key that turn, which all heads share."""
    value_dim: int
    rotary: RotarySpec
    scale: float
    """The factor of scores before the softmax."""
    is_interleaved: bool = True
    """Whether checkpoints have the pairs that turn side by side."""
    bias: bool = False
    """Whether q_a, kv_a and o have biases: then q has none, and lies apart from kv_a."""

    @property
    def lifetime(self) -> PageLifetime:
        return PageLifetime()

    @property
    def heads(self) -> Axis:
        return Axis(self.num_heads, self.value_dim, ATTENTION)

    @property
    def kv_heads(self) -> Axis:
        return Axis(1, self.kv_rank + self.rotary_dim)

    @property
    def is_latent(self) -> bool:
        return True

    @property
    def latent_sizes(self) -> tuple[int, int]:
        return self.kv_rank, self.rotary_dim

    def pieces(self, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
        latent, turned = Axis(self.kv_rank), self.rotary_dim * self.is_interleaved
        query_heads = Axis(self.num_heads, self.key_dim + self.rotary_dim, ATTENTION)
        kv_a = Part(prefix + "kv_a", self.kv_heads, turned, self.kv_rank)
        kv_b = Part(prefix + "kv_b", Axis(self.num_heads, self.key_dim + self.value_dim, ATTENTION))
        made: tuple[Piece, ...]
        if self.q_rank:
            inputs = Axis(self.q_rank)
            made = (
                Linear(prefix + "qkv_a", (Part(prefix + "q_a", inputs), kv_a), hidden, self.bias),
                Vector(prefix + "q_a_norm.weight", inputs),
                Linear(prefix + "q_b", (Part(prefix + "q_b", query_heads, turned, self.key_dim),), inputs),
            )
        else:
            q = Part(prefix + "q", query_heads, turned, self.key_dim)
            made = (Linear(prefix + "qkv_a", (q, kv_a), hidden),)
            if self.bias:
                made = Linear(prefix + "q", (q,), hidden), Linear(prefix + "kv_a", (kv_a,), hidden, has_bias=True)
        return (
            *made,
            Vector(prefix + "kv_a_norm.weight", latent),
            Linear(prefix + "kv_b", (kv_b,), latent, key_rows=self.key_dim),
            Linear(prefix + "o", (Part(prefix + "o", hidden),), self.heads, self.bias),
        )

    def mix(self, sub: Sublayer, x: Slot) -> Slot:
        """New latents go to the cache before queries read it."""
        program, heads, width = sub.program, len(sub.shard.units(self.heads)), self.kv_rank + self.rotary_dim
        queries, kv = self._queries_and_latents(sub, x, heads)
        table = sub.constant(
            "cos_sin",
            (self.rotary, self.rotary_dim),
            functools.partial(cos_sin_table, self.rotary, self.rotary_dim),
        )
        rotation = sub.rotation((table,), self.rotary_dim)
        cache, scales = sub.cache("k_cache"), sub.cache("k_scales")
        norm = sub.weight("kv_a_norm.weight")
        program.op("latent_append", queries, kv, norm, _EPSILON, rotation, cache, scales, sub.slots)
        own = self.on_rank(sub.shard)
        attended = sub.buffer("attended", heads * self.value_dim)
        program.op(
            "latent_attention",
            queries,
            LatentWeights(sub.weight("kv_b.k_up"), sub.weight("kv_b.v_up")),
            cache,
            scales,
            sub.meta("attention", own, lambda context: context.attention(own)),
            program.view(sub.buffer("absorbed", heads * width), heads, width),
            program.view(sub.buffer("mixed", heads * self.kv_rank), heads, self.kv_rank),
            program.view(attended, heads, self.value_dim),
        )
        return attended

    def _queries_and_latents(self, sub: Sublayer, x: Slot, heads: int) -> tuple[Slot, Slot]:
        """One product makes both, or what queries are made of, and the ops that follow read columns of it."""
        program, size, width = sub.program, self.key_dim + self.rotary_dim, self.kv_rank + self.rotary_dim
        if self.bias and not self.q_rank:
            queries, kv = sub.buffer("q", heads * size), sub.buffer("latent", width)
            sub.linear("q", x, queries)
            sub.linear("kv_a", x, kv)
            return program.view(queries, heads, size), kv
        first = self.q_rank or heads * size
        both = sub.buffer("qkv_a", first + width)
        sub.linear("qkv_a", x, both)
        kv = program.columns(both, first, width)
        if not self.q_rank:
            return program.columns(both, 0, heads, size), kv
        made, queries = sub.buffer("q_a", self.q_rank), sub.buffer("q", heads * size)
        norm = sub.weight("q_a_norm.weight")
        program.op("rms_norm", program.columns(both, 0, self.q_rank), norm, _EPSILON, made)
        sub.linear("q_b", made, queries)
        return program.view(queries, heads, size), kv

    def project(self, sub: Sublayer, attended: Slot) -> None:
        sub.add_linear("o", attended)

    def on_rank(self, shard: Shard) -> AttentionHeads:
        """The heads of one rank."""
        count = len(shard.units(self.heads))
        return AttentionHeads(
            kv_head_of=(0,) * count,
            num_kv_heads=1,
            head_dim=self.kv_heads.unit,
            scale=self.scale,
            most_kv_heads=1,
            group=-(-self.num_heads // shard.groups[ATTENTION].size),
            latents=LatentSizes(self.kv_rank, self.key_dim, self.rotary_dim, self.value_dim),
        )
