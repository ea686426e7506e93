"""Random weights: a function of name and place."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from allspan.worker.quant.gguf import NATIVE
from allspan.worker.weights.random_weights import RandomWeights

SHAPES = {"a.weight": (3000, 40), "b.weight": (3000, 40), "b.bias": (3000,), "input_norm.weight": (40,)}


def part(weights: RandomWeights, name: str, *ranges: range) -> Tensor:
    out = torch.empty([len(r) for r in ranges])
    weights.read(name, ranges, out)
    return out


def test_a_slice_is_the_cut_of_the_whole_and_a_second_reader_sees_the_same() -> None:
    first, second = RandomWeights(SHAPES), RandomWeights(SHAPES)
    for name in ("a.weight", "b.weight"):
        whole = part(first, name, range(3000), range(40))
        assert torch.equal(part(second, name, range(500, 2900), range(7, 31)), whole[500:2900, 7:31])
    assert torch.equal(part(first, "b.bias", range(10, 20)), part(second, "b.bias", range(3000))[10:20])


def test_tensors_and_rows_differ_and_have_the_spread_of_an_initialised_model() -> None:
    weights = RandomWeights(SHAPES)
    a, b = (part(weights, name, range(3000), range(40)) for name in ("a.weight", "b.weight"))
    assert not torch.equal(a, b)
    assert len({tuple(row) for row in a.tolist()}) == 3000
    assert abs(float(a.std()) - 0.02) < 0.001
    assert part(weights, "input_norm.weight", range(40)).eq(1).all()


@pytest.mark.parametrize("kind", NATIVE)
def test_blocks_of_every_kept_type_have_that_spread_too(kind: str) -> None:
    weights = RandomWeights({"a.weight": (64, 512)}, {"a.weight": kind})
    raw = weights.blocks("a.weight", range(64), range(512)).numpy()
    decoded = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert 0.5 < decoded.std() / 0.02 < 2
    assert abs(decoded.mean()) < 0.005
