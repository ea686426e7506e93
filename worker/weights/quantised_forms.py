"""The forms in which tools store quantised matrices, recognised by the tensors of a matrix and its config.

| tensors | written by |
|---|---|
| weight (e4m3), weight_scale or weight_scale_inv (a scale, too) | vLLM's `fp8` and `fbgemm_fp8`, compressed-tensors |
| X [experts, out, in] (e4m3), X_scale_inv, with or without `.weight` | transformers, of experts in one tensor |
| weight (int8), weight_scale, weight_zero_point | compressed-tensors, `int-quantized` |
| weight_packed, weight_shape, weight_scale, weight_zero_point, weight_g_idx | compressed-tensors, `pack-quantized` |
| qweight, qzeros, scales, g_idx | GPTQ |
| qweight, qzeros, scales | AWQ (`gemm`) |

Any of them may have one dimension more in front, the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from allspan.worker.weights.quantised_matrix import (
    AwqMatrix,
    GptqMatrix,
    QuantisedMatrix,
    ScaledMatrix,
    StackedMatrix,
    WordMatrix,
    in_groups,
)

Config = Mapping[str, Any]
"""A quantization_config."""

STACKED_MARKS = ("_scale", "_scale_inv")
"""Endings of the names of scales beside a tensor that has the matrices of all experts, behind its own name."""

MARKS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
"""Suffixes of tensors that only quantised matrices have."""

SUFFIXES = (*MARKS, "weight", "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx")
"""Suffixes of all tensors that a matrix may have."""

_WORDS = frozenset({"weight_packed", "qweight", "qzeros"})
"""Suffixes of tensors whose elements are several codes each."""

_ALTERNATIVES = ("weight", "weight_packed", "qweight"), ("weight_scale", "weight_scale_inv")


def quantised_matrix(tensors: Mapping[str, Tensor], config: Config) -> QuantisedMatrix:
    """From the tensors of a matrix by their suffixes, and the config. Raises ValueError, or KeyError for one that is
    missing."""
    for alternatives in _ALTERNATIVES:
        if len(there := [each for each in alternatives if each in tensors]) > 1:
            raise ValueError(f"it has both {there[0]} and {there[1]}: remove one of them")
    codes = next((each for each in _ALTERNATIVES[0] if each in tensors), "weight")
    for suffix in _WORDS & tensors.keys():
        if (dtype := tensors[suffix].dtype) is not torch.int32:
            raise ValueError(f"{suffix} is {dtype}, must be torch.int32: codes are packed in words")
    if tensors[codes].ndim == 3:
        return _stacked(tensors, codes, config)
    if codes == "weight_packed":
        return _packed(tensors, config)
    if codes == "weight":
        return _scaled(tensors, config)
    is_awq = config.get("quant_method", config.get("quant_type")) == "awq"
    return _awq(tensors, config) if is_awq else _gptq(tensors, config)


def _scaled(tensors: Mapping[str, Tensor], config: Config) -> QuantisedMatrix:
    weight = tensors["weight"]
    scale = tensors["weight_scale"] if "weight_scale" in tensors else tensors["weight_scale_inv"]
    zero = tensors.get("weight_zero_point")
    names = {torch.float8_e4m3fn: "fp8", torch.int8: "a8w8" if _has_small_inputs(config) else "int8"}
    if weight.dtype not in names:
        raise ValueError(f"weights are {weight.dtype}, which is not supported ({', '.join(map(str, names))})")
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):  # exponents of powers of two
        scale = scale.view(torch.float8_e8m0fnu).float()
    outputs, inputs = weight.shape
    block = _block(config)
    if scale.numel() == 1:
        tall, group, scale = outputs, -1, scale.reshape(1, 1)
    elif scale.numel() == outputs and (block is None or scale.ndim == 1):
        tall, group, scale = 1, -1, scale.reshape(outputs, 1)
    elif block is not None and scale.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        tall, group = block
    elif scale.ndim == 2 and scale.shape[0] == outputs:
        tall, group = 1, _group(inputs, scale.shape[1], config)
    else:
        raise ValueError(_misfit(weight, scale, block))
    zero = None if zero is None else zero.reshape(scale.shape)
    return ScaledMatrix(names[weight.dtype], (outputs, inputs), group, None, weight, scale, tall, zero)


def _misfit(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> str:
    """What is wrong with the shape of these scales, and which one blocks would have."""
    text = f"the scales are neither one for all, nor for each output, nor for blocks of {block}"
    if block is None:
        return text
    expected = [-(-size // each) for size, each in zip(weight.shape, block, strict=True)]
    return f"{text}: they have shape {list(scale.shape)}, where blocks have {expected}"


def _stacked(tensors: Mapping[str, Tensor], codes: str, config: Config) -> QuantisedMatrix:
    """The matrices of all experts, whose `codes` have the experts in front."""
    experts = len(tensors[codes])
    every = {suffix: _of_each(suffix, tensor, tensors[codes], config) for suffix, tensor in tensors.items()}
    for suffix, tensor in every.items():
        if tensor.shape[:1] != (experts,):
            raise ValueError(f"{suffix} is not of {experts} experts, as {codes} is")
    matrices = []
    for expert in range(experts):
        try:
            matrices.append(quantised_matrix({suffix: each[expert] for suffix, each in every.items()}, config))
        except (ValueError, KeyError) as error:
            lack = "it has no " if isinstance(error, KeyError) else ""
            raise ValueError(f"expert {expert}: {lack}{error}") from error
    return StackedMatrix.of(matrices)


def _of_each(suffix: str, tensor: Tensor, codes: Tensor, config: Config) -> Tensor:
    """With the experts in front what all of them share: a scale or a shape. Of gate above up each may have a scale,
    which is given to its outputs."""
    experts, outputs = codes.shape[:2]
    if suffix == "weight_shape" and tensor.ndim == 1:
        return tensor[-2:].expand(experts, -1)
    if suffix in _ALTERNATIVES[1] and tensor.numel() == 1:
        return tensor.reshape(1).expand(experts)
    if suffix in _ALTERNATIVES[1] and tensor.numel() == 2 * experts and _block(config) is None:
        halves = tensor.reshape(experts, 2, 1).expand(experts, 2, -(-outputs // 2))
        return halves.reshape(experts, -1)[:, :outputs]
    return tensor


def _packed(tensors: Mapping[str, Tensor], config: Config) -> QuantisedMatrix:
    words, scale, zero = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    outputs, inputs = (int(size) for size in tensors["weight_shape"].tolist())
    bits = next((bits for bits in (4, 8) if -(-inputs * bits // 32) == words.shape[1]), 0)
    if not bits or scale.shape[0] != outputs or words.shape[0] != outputs:
        raise ValueError("these are not codes of 4 or 8 bits")
    if zero is not None and zero.shape != (-(-outputs * bits // 32), scale.shape[1]):
        raise ValueError("the zeros are not packed like the weights")
    group = _group(inputs, scale.shape[1], config)
    order = _order(tensors.get("weight_g_idx"), inputs, group)
    return WordMatrix(f"int{bits}", (outputs, inputs), group, order, bits, words, scale, zero)


def _gptq(tensors: Mapping[str, Tensor], config: Config) -> QuantisedMatrix:
    words, zero, scale, group_of = tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors.get("g_idx")
    bits = int(config["bits"])
    inputs = words.shape[0] * 32 // bits if group_of is None else len(group_of)
    outputs = words.shape[1]
    bits = words.shape[0] * 32 // max(1, inputs)  # some layers may have others than most
    if bits not in (4, 8):
        raise ValueError(f"codes of {bits} bits are not supported (4, 8)")
    if scale.shape[1] != outputs or zero.shape != (len(scale), outputs * bits // 32):
        raise ValueError("the zeros or the scales are not those of the weights")
    group = _group(inputs, len(scale), config)
    order = _order(group_of, inputs, group)
    lack = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    return GptqMatrix(f"int{bits}", (outputs, inputs), group, order, bits, words, zero, scale, lack)


def _awq(tensors: Mapping[str, Tensor], config: Config) -> QuantisedMatrix:
    words, zero, scale = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"AWQ with {bits} bits in version {version!r} is not supported (4, 'gemm')")
    inputs, outputs = words.shape[0], words.shape[1] * 8
    if scale.shape[1] != outputs or zero.shape != (len(scale), words.shape[1]):
        raise ValueError("the zeros or the scales are not those of the weights")
    return AwqMatrix("int4", (outputs, inputs), _group(inputs, len(scale), config), None, words, zero, scale)


def _group(inputs: int, groups: int, config: Config) -> int:
    """Returns the number of inputs that share a scale, where there are `groups` groups."""
    if groups == 1:
        return -1
    sizes = [
        config.get("group_size", config.get("q_group_size")),
        *(args.get("group_size") for args in _weights(config)),
    ]
    for size in sizes:
        if isinstance(size, int) and size > 0 and -(-inputs // size) == groups:
            return size
    raise ValueError(f"{inputs} inputs do not have {groups} groups of {sizes}")


def _order(group_of: Tensor | None, inputs: int, group: int) -> Tensor | None:
    """See `QuantisedMatrix.group_of`."""
    if group_of is None or group == -1:
        return None
    if group_of.shape != (inputs,):
        raise ValueError(f"{list(group_of.shape)} groups are named for {inputs} inputs")
    named, count = group_of.long(), -(-inputs // group)
    if inputs and (named.min() < 0 or named.max() >= count):
        raise ValueError(f"inputs are in groups {named.min()} to {named.max()}, must be in 0 to {count - 1}")
    return None if torch.equal(named, in_groups(inputs, group)) else named


def _weights(config: Config) -> Iterable[Config]:
    """What compressed-tensors says of weights."""
    groups = (config.get("config_groups") or {}).values()
    return [group.get("weights") or {} for group in groups]


def _has_small_inputs(config: Config) -> bool:
    """Whether compressed-tensors has 8 bits for the inputs of integers; other groups may be of other numbers."""
    for group in (config.get("config_groups") or {}).values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        if inputs.get("num_bits") == 8 and weights.get("type", "int") == "int" and weights.get("num_bits", 8) == 8:
            return True
    return False


def _block(config: Config) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale."""
    found = config.get("weight_block_size")
    for args in _weights(config):
        found = found or args.get("block_structure")
    if not found:
        return None
    tall, wide = found
    return int(tall), int(wide)
