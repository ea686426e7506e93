"""A ModelSpec as JSON values, for manifests and reports: layers that follow each other and are equal are one entry with
their count, and a block has its name from the table of blocks."""

from __future__ import annotations

import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.limits import CONFIG_SIZES, MAX_NUMBER, MAX_SIZE
from allspan.worker.models.blocks.table import BLOCKS
from allspan.worker.models.spec import LayerSpec, ModelSpec

_SIZES = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "window": ""}
"""A field of a block → the name in config.json under which its limit is known."""
_POSITIVE = {*_SIZES, *CONFIG_SIZES} - {"original_max_position_embeddings"}


class SpecMismatch(ValueError):
    """Another version's spec: `names` are those of the fields that one has and the other has not."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


def spec_json(spec: ModelSpec) -> dict[str, Any]:
    """What `spec_of` reads."""
    layers = [{"count": len(list(alike))} | _values(layer) for layer, alike in itertools.groupby(spec.layers)]
    return {**_values(spec), "layers": layers}


def spec_of(values: Mapping[str, Any]) -> ModelSpec:
    """Raises SpecMismatch unless the values are those of this version's classes."""
    found = values.get("layers")
    if not isinstance(found, list) or not all(isinstance(run, dict) and "count" in run for run in found):
        raise SpecMismatch(["layers", *sorted({*values} - {field.name for field in fields(ModelSpec)})])
    layers: list[LayerSpec] = []
    most = CONFIG_SIZES["num_hidden_layers"]
    for run in found:
        layer, count = _read(LayerSpec, {name: value for name, value in run.items() if name != "count"}), run["count"]
        if type(count) is not int or not 1 <= count <= most - len(layers):
            raise SpecMismatch([f"layers: count {shown(count)}, must be from 1 to {most} in all"])
        layers += [layer] * count
    if not layers:
        raise SpecMismatch(["layers"])
    spec: ModelSpec = _read(ModelSpec, {**values, "layers": tuple(layers)})
    return spec


def difference(before: ModelSpec, now: ModelSpec) -> str:
    """The first value in which they differ; "" when the weights of one fit the other."""
    return _difference("", spec_json(before), spec_json(now))


def _difference(where: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        pairs = ((f"{where}.{key}" if where else key, old[key], new[key]) for key in old)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = ((f"{where}[{i}]", *both) for i, both in enumerate(zip(old, new, strict=True)))
    else:
        return "" if old == new else f"{where} is {new}, was {old}"
    return next((found for pair in pairs if (found := _difference(*pair))), "")


def _values(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists."""
    if isinstance(value, tuple):
        return [_values(each) for each in value]
    if not is_dataclass(value):
        return value
    own = {field.name: _values(getattr(value, field.name)) for field in fields(value)}
    name = next((name for name, block in BLOCKS.items() if type(value) is block), None)
    return own if name is None else {"block": name} | own


def _read(kind: Any, value: Any) -> Any:
    if isinstance(value, dict) and "block" in value:
        kind = BLOCKS.get(value["block"])
        if kind is None:
            raise SpecMismatch([f"block {value['block']!r}"])
        value = {name: each for name, each in value.items() if name != "block"}
    if isinstance(kind, types.UnionType):
        kind = None if value is None else next(each for each in typing.get_args(kind) if each is not type(None))
    if isinstance(value, list):
        return tuple(value)
    if not is_dataclass(kind) or not isinstance(kind, type) or isinstance(value, kind):
        return value
    names = {field.name for field in fields(kind)}
    given = set(value) if isinstance(value, dict) else set()
    if given != names:
        raise SpecMismatch(sorted(names ^ given))
    hints = typing.get_type_hints(kind)
    read = {name: _read(hints[name], each) for name, each in value.items()}
    for name, each in read.items():
        known = CONFIG_SIZES.get(_SIZES.get(name, name))
        if not _fits(hints[name], each, known or MAX_SIZE) or (each == 0 and known and name in _POSITIVE):
            raise SpecMismatch([f"{name}: {shown(each)}"])
    return kind(**read)


def _fits(kind: Any, value: Any, most: int) -> bool:
    """Whether a value is of a field's type, and a number within its limit."""
    if isinstance(kind, types.UnionType):
        return any(_fits(each, value, most) for each in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return isinstance(value, tuple) and len(value) <= most and all(_fits(item, each, most) for each in value)
    if kind is int:
        return type(value) is int and 0 <= value <= most
    if kind is float:
        return type(value) in (int, float) and 0 <= value <= MAX_NUMBER
    if isinstance(kind, type) and kind in (bool, str, types.NoneType):
        return type(value) is kind
    return is_dataclass(value)
