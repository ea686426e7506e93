"""What one token needs of a model: its parameters, and the bytes of weights that a decode step reads for it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from allspan.worker.models.blocks.moe import Moe
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import layout
from allspan.worker.models.pieces import EP, Linear, Piece, Table, tensors_of
from allspan.worker.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers in all tensors of a model, and in those that a token uses: of experts, the ones that it goes to."""

    total: int
    active: int


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of weights that a rank reads in a decode step of one token. `mean` is over all choices of experts, each as
    likely as another; `busiest` is what a rank of the group reads that most of the token's experts are on, on average:
    the others wait for it in every layer. There copies of an expert count as if they were others."""

    mean: int
    busiest: int


def count_parameters(spec: ModelSpec) -> Parameters:
    total = active = 0
    for piece in layout(spec):
        held = sum(math.prod(axis.size for axis in axes) for _, axes in tensors_of(piece))
        total += held
        experts, top_k = _choice(spec, piece)
        active += held // experts * top_k
    return Parameters(total, active)


def token_bytes(holding: Holding) -> TokenBytes:
    """The embedding counts where it is the head; of it as a table a token reads one row."""
    mean = busiest = 0.0
    spec, shard = holding.spec, holding.shard
    for piece in holding.pieces:
        held = sum(tensor.num_bytes for tensor in holding.tensors(piece).values())
        if isinstance(piece, Table) and not (spec.tie_word_embeddings and shard.stage.is_last):
            continue
        if not isinstance(piece, Linear) or piece.experts is None:
            mean, busiest = mean + held, busiest + held
            continue
        experts, top_k = _choice(spec, piece)
        placement, group = holding.placement(_layer(piece), experts), shard.groups[EP].rank
        places = tuple(map(len, placement.groups))
        each = held / max(1, places[group])
        mean += each * placement.tokens((top_k / experts,) * experts)[group]
        busiest += each * most_in_a_group(places, top_k)
    return TokenBytes(math.ceil(mean), math.ceil(busiest))


@functools.cache
def most_in_a_group(groups: tuple[int, ...], chosen: int) -> float:
    """The expected number of experts in the group that has most of those `chosen` out of all groups, every choice being
    as likely as another."""
    every, expected = math.comb(sum(groups), chosen), 0.0
    for most in range(chosen):  # the sum of the chances that some group has more than that
        ways = [1] + [0] * chosen
        for size in groups:
            own = [math.comb(size, count) for count in range(min(most, size) + 1)]
            ways = [sum(own[j] * ways[i - j] for j in range(min(i + 1, len(own)))) for i in range(chosen + 1)]
        expected += 1 - ways[chosen] / every
    return expected


def _choice(spec: ModelSpec, piece: Piece) -> tuple[int, int]:
    """Returns the experts of a piece and how many of them a token goes to; 1 and 1 where all tokens go through it."""
    if not isinstance(piece, Linear) or piece.experts is None:
        return 1, 1
    mlp = spec.layers[_layer(piece)].mlp
    return (mlp.num_experts, mlp.router.top_k) if isinstance(mlp, Moe) else (1, 1)


def _layer(piece: Piece) -> int:
    return int(piece.name.split(".")[1])  # layers.N.…
