"""Requests of a step of which keys and values are made, and those that stay latents: chosen on the host, by counts.

Costs are multiplications of a head and a layer. The keys and values of a token cost latent · (key + value); a new
token's own are for nothing, as its query would be multiplied by the same matrices. A query and a token that it sees
cost key + rot + value then, else 2 · latent + rot. With latents of 512 and 64 that turn, and 128 + 128 elements of a
head, tokens before pay from about 170 new ones on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.latent_tensors import LatentSizes

LEAST_ROWS = 256
"""With fewer new tokens in a step, latents stay as they are."""

MOST_BEFORE = 1 << 18
"""Tokens before the new ones of a step that there is room for, at most."""

Ints = NDArray[np.int64]

_CAPTURED = 2048
"""Tokens before the new ones that captured steps make keys and values of, at most: about what prompts leave over that
straddle two steps. cuBLAS multiplies as many rows even where there are fewer."""
_LAUNCHING = 2.5e11
"""What a GPU multiplies in the millisecond that the host takes longer for launching a layer of a small step than the
GPU for the rest of it."""
_AT_ONCE, _LEAST_HEADS = 1 << 18, 4
"""Tokens times heads, and heads at least, that there are keys and values of at once: 168 MB of V2's and V3's."""
_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpandRule:
    """The same for every rank of a world, whose GPUs are alike."""

    sizes: LatentSizes
    heads: int
    """A rank's, at most."""
    most: int
    """Tokens that there is room for the keys and values of."""
    multiprocessors: int

    def choose(self, new: Ints, before: Ints, most: int) -> NDArray[np.bool_]:
        """Returns which requests, of so many new tokens and tokens before, keys and values are made of: those for which
        it pays, the shortest first, of up to `most` tokens together."""
        chosen, lens = self._pays(new, before), new + before
        order = np.argsort(np.where(chosen, lens, 0), kind="stable")
        fits = np.zeros(len(new), dtype=np.bool_)
        fits[order] = np.cumsum(np.where(chosen, lens, 0)[order]) <= min(most, self.most)
        return chosen & fits

    def captured(self, tokens: int) -> int:
        """Returns the most tokens that a captured step of so many new ones makes keys and values of."""
        return min(tokens + min(tokens, _CAPTURED), self.most)

    def launches(self, new: Ints, before: Ints, most: int) -> bool:
        """Whether a step takes longer where keys and values are made of `most` tokens only than where the host launches
        every kernel."""
        left = self._pays(new, before) & ~self.choose(new, before, most)
        return bool(self.heads * self._pairs(new, before)[left].sum() * self._absorbed > _LAUNCHING)

    @property
    def at_once(self) -> int:
        """Tokens times heads that there is room for at once."""
        return min(max(_AT_ONCE, self.most * _LEAST_HEADS), self.most * self.heads)

    @property
    def _absorbed(self) -> int:
        return 2 * self.sizes.latent + self.sizes.rot

    def _pairs(self, new: Ints, before: Ints) -> NDArray[np.float64]:
        """Queries and the tokens that they see."""
        return new * (before + new / 2)

    def _pays(self, new: Ints, before: Ints) -> NDArray[np.bool_]:
        latent, key, rot, value = self.sizes
        at_once = min(self.heads, self.at_once // max(1, int((new + before).sum())))
        tiles = max(1, at_once) * int((-(-new // _TILE_ROWS)).sum())
        idle = max(1.0, self.multiprocessors / max(1, tiles))  # no tile is cut, as those of latents are
        pairs = self._pairs(new, before)
        made = before * (latent * (key + value)) + pairs * ((key + rot + value) * idle)
        pays: NDArray[np.bool_] = (new > 0) & ((before == 0) | (made < pairs * self._absorbed))
        return pays
