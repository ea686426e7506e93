"""What the fields of a quantization_config must be for their tensors to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allspan.protos.api.errors import CheckpointError

_Test = Callable[[Any], bool]


def check_config(config: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError that names the first field of the file `source` which is not what tools write. Fields
    that are missing or null are not looked at."""
    method = config.get("quant_method") or config.get("quant_type")
    if method in ("gptq", "awq"):
        for name in ("bits", "w_bit"):
            _check(config, name, source, _is_number_from(1), "a number of bits from 1 on")
        for name in ("group_size", "q_group_size"):
            _check(config, name, source, _is_group, "a number of inputs from 1 on, or -1 for one group")
    if method == "gptq" and config.get("bits") is None:
        raise CheckpointError(f"{source}: bits of the quantization_config is missing: add the number of bits of a code")
    _check(
        config, "weight_block_size", source, _is_block, "the outputs and the inputs of a block, two numbers from 1 on"
    )
    _check(config, "config_groups", source, _is_object, "an object with an object for each group of layers")
    for name, group in (config.get("config_groups") or {}).items():
        at = f"config_groups.{name}"
        if not _is_object(group):
            raise CheckpointError(_told(source, at, group, "an object"))
        for part in ("weights", "input_activations"):
            _check(group, part, source, _is_object, "an object", f"{at}.{part}")
        weights, at = group.get("weights"), f"{at}.weights"
        _check(weights, "num_bits", source, _is_number_from(1), "a number of bits from 1 on", f"{at}.num_bits")
        _check(weights, "group_size", source, _is_group, "a number of inputs from 1 on, or -1", f"{at}.group_size")
        _check(weights, "block_structure", source, _is_block, "two numbers from 1 on", f"{at}.block_structure")


def _check(fields: Mapping[str, Any] | None, name: str, source: str, test: _Test, limit: str, shown: str = "") -> None:
    value = (fields or {}).get(name)
    if value is not None and not test(value):
        raise CheckpointError(_told(source, shown or name, value, limit))


def _told(source: str, name: str, value: Any, limit: str) -> str:
    return (
        f"{source}: {name} of the quantization_config is {str(value)[:80]!r}, must be {limit}: take the file that the "
        "tool wrote, or mend it"
    )


def _is_number_from(least: int) -> _Test:
    return lambda value: type(value) is int and value >= least


def _is_group(value: Any) -> bool:
    return type(value) is int and (value == -1 or value >= 1)


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) is int and each >= 1 for each in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
