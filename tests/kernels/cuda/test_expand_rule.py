"""Requests of which keys and values are made of latents."""

from __future__ import annotations

import numpy as np

from allspan.kernels.cuda.latent.expand_rule import ExpandRule
from allspan.kernels.latent_tensors import LatentSizes

Prompts = list[tuple[int, int]]
"""New tokens, and tokens before them."""
LONGEST = 40_000
RULE = ExpandRule(LatentSizes(512, 128, 64, 128), 16, 8192 + LONGEST, 132)


def chosen(prompts: Prompts, most: int = RULE.most) -> list[bool]:
    new, before = (np.array([each[i] for each in prompts], dtype=np.int64) for i in range(2))
    return [bool(each) for each in RULE.choose(new, before, most)]


def test_keys_and_values_are_made_where_tokens_before_are_seen_by_many_new_ones() -> None:
    beside = (4000, 0)  # tiles enough for all multiprocessors
    assert chosen([beside, (169, 9000), (171, 9000), (2, 2), (2, 0), (999, 9000)]) == [
        True, False, True, False, True, True,
    ]  # fmt: skip


def test_few_tiles_of_long_prompts_stay_latents_which_are_cut() -> None:
    assert chosen([(256, 20_000)]) == [False]
    assert chosen([(512, 9000)]) == [True]
    assert chosen([(512, 30_000)]) == [False]  # half of the heads at once
    assert chosen([(1024, 30_000)]) == [True]


def test_where_there_is_no_room_the_longest_stay_latents() -> None:
    assert chosen([(2000, 30_000), (3000, 0), (1000, 2000)], 6000) == [False, True, True]
    assert chosen([(2000, 30_000), (3000, 0), (1000, 2000)], 36_000) == [False, True, True]
    assert chosen([(2000, 30_000), (3000, 0), (1000, 2000)], 38_000) == [True, True, True]
    assert chosen([(8000, LONGEST), (8000, LONGEST)]) == [True, False]
