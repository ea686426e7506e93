"""What the linear methods hold, how they fill it, and the ops that they emit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.kernels.reference.packed_linear import unpack
from allspan.protos.api.errors import ConfigError
from allspan.worker.models.shard import split
from allspan.worker.program.program import ProgramBuilder, Rows
from allspan.worker.quant.base import Epilogue, LinearMethod, LinearShape
from allspan.worker.quant.gguf import NATIVE as KEPT
from allspan.worker.quant.packed import PackedMethod
from allspan.worker.quant.table import METHODS
from support.gguf_blocks import random_blocks

BITS = {"none": 0, "int8": 8, "a8w8": 8, "uint4": 4, "a8w4": 4}
NATIVE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@dataclass
class Layer:
    """A layer's whole tensors; `first` are the rows of each part where a rank's begin. See `quant.base.Source`."""

    weights: Sequence[Tensor]
    kinds: Sequence[str] = ()
    first: Sequence[int] = (0, 0, 0)

    def bias(self, part: int, out: Tensor) -> None:
        out.fill_(part + 1)

    def floats(self, part: int, rows: range, inputs: range, out: Tensor) -> None:
        first = self.first[part]
        out.copy_(self.weights[part][first + rows.start : first + rows.stop, inputs.start : inputs.stop])

    def blocks(self, part: int, rows: range, inputs: range) -> Tensor:
        kind = gguf.GGMLQuantizationType[self.kinds[part]]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        raw = torch.from_numpy(_raw(self.weights[part], kind))
        first = self.first[part]
        columns = slice(inputs.start // elements * size, -(-inputs.stop // elements) * size)
        return raw[first + rows.start : first + rows.stop, columns].contiguous()


def _raw(weight: Tensor, kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """The weight quantised, or random blocks of a type that the `gguf` package only reads."""
    try:
        return gguf.quantize(weight.numpy(), kind)
    except NotImplementedError:
        return random_blocks(kind, *weight.shape, 0.1)


def random_layer(*rows: int, inputs: int = 192, kinds: Sequence[str] = ()) -> Layer:
    generator = torch.Generator().manual_seed(4)
    return Layer([torch.randn((size, inputs), generator=generator) * 0.1 for size in rows], kinds)


def shape_of(layer: Layer, inputs: range | None = None, parts: Sequence[int] = (), **more: object) -> LinearShape:
    whole = layer.weights[0].shape[1]
    rows = tuple(parts) or tuple(len(weight) for weight in layer.weights)
    shape = LinearShape(rows, range(whole) if inputs is None else inputs, whole, stored=tuple(layer.kinds))
    return replace(shape, **more)  # type: ignore[arg-type]


def held_by(method: LinearMethod, shape: LinearShape, layer: Layer) -> dict[str, Tensor]:
    held = {suffix: torch.full(t.shape, 7, dtype=t.dtype) for suffix, t in method.tensors(shape).items()}
    method.load(shape, layer, held, Packer())
    return held


def meaning(method: LinearMethod, shape: LinearShape, layer: Layer) -> Tensor:
    """float32 [outputs, inputs] of what is held."""
    assert isinstance(method, PackedMethod)
    held = held_by(method, shape, layer)
    return torch.cat([unpack(held[part.weight], part.spec) for part in method.packed(shape)])


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_parts_begin_a_panel_each_and_biases_stay_float32(dtype: str, item: int) -> None:
    method = METHODS["none"](getattr(torch, dtype), 0)
    layer = random_layer(3, 18, inputs=4)
    shape = shape_of(layer, has_bias=True)
    declared = method.tensors(shape)
    assert declared["weight"].num_bytes == (1 + 2) * 16 * 32 * item
    assert declared["bias"].num_bytes == 21 * 4
    assert held_by(method, shape, layer)["bias"].tolist() == [1.0] * 3 + [2.0] * 18
    expected = torch.cat(tuple(layer.weights)).to(getattr(torch, dtype)).float()
    assert torch.equal(meaning(method, shape, layer), expected)


@pytest.mark.parametrize("name", [name for name in BITS if name != "none"])
@pytest.mark.parametrize("group", [-1, 32, 64, 512])
def test_what_is_held_is_near_the_weight(name: str, group: int) -> None:
    """Half a step of each feature's, or group's, range; float16 scales and offsets add their rounding."""
    layer = random_layer(40)
    (weight,) = layer.weights
    held = meaning(METHODS[name](torch.float32, group), shape_of(layer), layer)
    size = 192 if group == -1 else min(group, 192)
    grouped = weight.reshape(40, -1, size)
    step = (grouped.amax(2, keepdim=True) - grouped.amin(2, keepdim=True)) / ((1 << BITS[name]) - 1)
    bound = step * 0.501 + (0 if group == -1 else grouped.abs().amax(2, keepdim=True) * 2.0**-10)
    assert ((held - weight).reshape(grouped.shape).abs() <= bound + 1e-7).all()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["none", "int8", "uint4", "a8w8", "a8w4", "gguf"])
@pytest.mark.parametrize("group", [0, -1, 64, 128])
def test_ranks_hold_slices_of_what_one_holds(name: str, group: int, ranks: int) -> None:
    """Bit for bit, wherever a split falls: rows anywhere, inputs within a group or block."""
    if group and name in ("none", "gguf"):
        return
    for kind in NATIVE if name == "gguf" else ("",):
        layer = random_layer(37, inputs=192, kinds=(kind,) if kind else ())
        method = METHODS[name](torch.float32, group)
        whole = meaning(method, shape_of(layer), layer)
        for rows in split(37, ranks):
            part = replace(layer, first=(rows.start,))
            assert torch.equal(meaning(method, shape_of(layer, parts=(len(rows),)), part), whole[rows])
        for inputs in split(101, ranks):  # not at the beginning, nor to the end
            inputs = range(inputs.start + 5, inputs.stop + 5)
            assert torch.equal(meaning(method, shape_of(layer, inputs), layer), whole[:, inputs])


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_ranks_hold_their_slice_of_the_files_values_wherever_a_split_falls(kind: str) -> None:
    """Bit for bit, of blocks of 32 and 256: splits within them, and on every side of their groups of 16 and 32."""
    layer, method = random_layer(18, inputs=768, kinds=(kind,)), METHODS["gguf"](torch.float32, 0)
    types = gguf.GGMLQuantizationType[kind]
    whole = torch.from_numpy(gguf.dequantize(_raw(layer.weights[0], types), types))
    for start, stop in itertools.pairwise((0, 1, 16, 47, 130, 256, 300, 511, 513, 768)):
        assert torch.equal(meaning(method, shape_of(layer, range(start, stop)), layer), whole[:, start:stop])


@pytest.mark.parametrize("kind", NATIVE)
def test_blocks_of_a_file_are_held_as_they_are(kind: str) -> None:
    layer = random_layer(20, 20, kinds=(kind, kind))
    shape = shape_of(layer, interleaved=True)
    types = gguf.GGMLQuantizationType[kind]
    decoded = [gguf.dequantize(gguf.quantize(weight.numpy(), types), types) for weight in layer.weights]
    expected = torch.cat([torch.from_numpy(each) for each in decoded])
    method = METHODS["gguf"](torch.bfloat16, 0)
    assert torch.equal(meaning(method, shape, layer), expected)
    assert method.tensors(shape)["weight"].num_bytes < 64 * 192 * 1.1


def test_parts_of_other_types_are_weights_of_their_own() -> None:
    """Neighbours that are alike stay together; a type that is not computed with is held in the weights' dtype."""
    layer = random_layer(20, 7, 9, kinds=("Q4_0", "Q4_0", "Q8_0"))
    method = METHODS["gguf"](torch.bfloat16, 0)
    shape = shape_of(layer, has_bias=True)
    assert list(method.tensors(shape)) == ["weight.0", "bias.0", "weight.1", "bias.1"]
    held = held_by(method, shape, layer)
    assert torch.cat((held["bias.0"], held["bias.1"])).tolist() == [1.0] * 20 + [2.0] * 7 + [3.0] * 9
    assert isinstance(method, PackedMethod)
    assert [part.spec.format for part in method.packed(replace(shape, stored=("Q4_0", "F16", "IQ1_S")))] == [
        "q4_0",
        "bf16",
    ]
    builder = ProgramBuilder()
    x, out = builder.buffer("x", Rows.TOKENS, 192), builder.buffer("out", Rows.TOKENS, 36)
    weights = {suffix: builder.named(suffix) for suffix in held}
    method.emit(builder, shape, weights, x, out)
    first, second = builder.build(out).ops
    assert first.arguments[:3] == (x, weights["weight.0"], weights["bias.0"])
    assert second.arguments[:3] == (x, weights["weight.1"], weights["bias.1"])
    assert (first.arguments[4:], second.arguments[4:]) == ((0, out), (27, out))


def test_an_epilogue_is_in_the_op_where_the_layer_is_one_weight() -> None:
    alike, other = ("Q8_0", "Q8_0"), ("Q8_0", "Q4_0")
    names = {
        ("Q8_0",): {Epilogue.STORE: ["packed_linear"], Epilogue.ADD: ["packed_linear_add"]},
        alike: {Epilogue.GATED_SILU: ["packed_gated_linear"]},
        other: {Epilogue.GATED_GELU_TANH: ["packed_linear", "packed_linear", "gated_mul"]},
    }
    for kinds, wanted in names.items():
        layer = random_layer(*[16] * len(kinds), kinds=kinds)
        method, shape = METHODS["gguf"](torch.float32, 0), shape_of(layer, interleaved=len(kinds) == 2)
        for epilogue, ops in wanted.items():
            builder = ProgramBuilder()
            x, out = builder.buffer("x", Rows.LOGITS, 192), builder.buffer("out", Rows.LOGITS, 16)
            weights = {suffix: builder.named(suffix) for suffix in method.tensors(shape)}
            method.emit(builder, shape, weights, x, out, epilogue)
            emitted = builder.build(out).ops
            assert [op.name for op in emitted] == ops
            assert {op.rows for op in emitted} == {Rows.LOGITS}


def test_the_embedding_and_the_head_are_left_in_their_dtype() -> None:
    layer = random_layer(20)
    for name in ("int8", "uint4", "a8w8", "a8w4"):
        method = METHODS[name](torch.bfloat16, 0)
        held = meaning(method, shape_of(layer, is_vocabulary=True), layer)
        assert torch.equal(held, layer.weights[0].bfloat16().float())


def test_a_rank_without_inputs_holds_weights_of_nothing() -> None:
    layer = random_layer(20)
    for name in ("none", "int8", "uint4"):
        held = held_by(METHODS[name](torch.float32, 0), shape_of(layer, range(5, 5)), layer)
        assert held["weight"].shape == (2, 128 if name == "int8" else 0)


def test_a_group_that_does_not_go_with_the_method_is_refused() -> None:
    for name in ("none", "gguf"):
        with pytest.raises(ConfigError, match=f"quantization_group 64 does not go with quantization '{name}'"):
            METHODS[name](torch.float32, 64)
    with pytest.raises(ConfigError, match=r"quantization_group 48 .* takes -1, 32, 64, 128, 256, 512"):
        METHODS["uint4"](torch.float32, 48)
