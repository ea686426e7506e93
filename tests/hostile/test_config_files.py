"""config.json, generation_config.json and manifests whose values cannot be: refused by file, field, value and limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.config.converted_manifest import FORMAT, MANIFEST
from support.hostile_models import CONFIG, HIDDEN, VOCABULARY, refusals, safetensors, save_sound

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
NO_SIZES = (0, -1, 2.5, 2.0, "2", True, [2], {"a": 2}, 10**9 + 7, 2**60, 10**18, 10**300)
NUMBERS: dict[str, tuple[object, ...]] = {
    "rope_theta": (0, -1.0, "10000", True, [1.0], 1e300),
    "rms_norm_eps": (0, -1e-5, "1e-5", False, [1e-5], 2.0),
}
ROPES = (
    5,
    "linear",
    [1],
    {"rope_type": "linear", "factor": -1.0},
    {"rope_type": "linear", "factor": 0},
    {"rope_type": "linear", "factor": "2"},
    {"rope_type": "linear", "factor": 1e300},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**18},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2.5},
    {"rope_type": "llama3", "factor": [2.0]},
)
TEXTS: dict[str, str | bytes] = {
    "empty": "",
    "spaces": "  \n",
    "a list": "[]",
    "a number": "5",
    "a text": '"config"',
    "null": "null",
    "cut": json.dumps(CONFIG)[:-5],
    "a comma too many": json.dumps(CONFIG)[:-1] + ",}",
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(CONFIG).encode(),
    "UTF-16": json.dumps(CONFIG).encode("utf-16"),
    "no UTF-8": json.dumps(CONFIG)[:-1].encode() + b', "a": "\xff"}',
    "zeros": bytes(100),
    "20 MB": json.dumps(CONFIG | {"a": "x" * 20_000_000}),
    "five million values": json.dumps(CONFIG)[:-1] + ', "a": [' + "0," * 5_000_000 + "0]}",
    "deep lists": json.dumps(CONFIG)[:-1] + ', "a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep objects": json.dumps(CONFIG)[:-1] + ', "a": ' + '{"a":' * 500 + "1" + "}" * 500 + "}",
    "70 deep": json.dumps(CONFIG)[:-1] + ', "a": ' + "[" * 70 + "]" * 70 + "}",
    "NaN": json.dumps(CONFIG | {"rope_theta": float("nan")}),
    "Infinity": json.dumps(CONFIG | {"rope_theta": float("inf")}),
    "-Infinity": json.dumps(CONFIG | {"a": float("-inf")}),
    "1e400": json.dumps(CONFIG).replace("10000.0", "1e400"),
    "-1e999": json.dumps(CONFIG).replace("10000.0", "-1e999"),
    "5,000 digits": json.dumps(CONFIG).replace("10000.0", "1" * 5000),
    "twice": json.dumps(CONFIG)[:-1] + ', "hidden_size": 8}',
    "half a surrogate": json.dumps(CONFIG)[:-1] + ', "a": "\\udfff"}',
}
IDS: tuple[object, ...] = (-1, 2.5, "1", True, [1, -1], [[1]], {"a": 1}, VOCABULARY, 10**9, 2**60, [0, 10**18])
GENERATION = (
    *({key: value} for key in ("eos_token_id",) for value in (-1, 2.5, "1", True, [-1], [[1]], {}, 10**9, 10**18)),
    {"temperature": "hot"},
    {"temperature": -1},
    {"temperature": 1e300},
    {"top_p": 5},
    {"top_p": [1]},
    {"top_k": 2.5},
    {"top_k": 10**30},
    {"min_p": -1},
    {"repetition_penalty": -1},
    {"max_new_tokens": 10**30},
    {"max_new_tokens": -5},
    {"do_sample": "yes"},
)

CASES: dict[str, tuple[str, str | bytes]] = (
    {f"{key} {shown}": ("config.json", json.dumps(CONFIG | {key: value})) for key in SIZES for value in NO_SIZES
     if (shown := json.dumps(value)[:20])}
    | {f"{key} {json.dumps(value)}": ("config.json", json.dumps(CONFIG | {key: value}))
       for key, values in NUMBERS.items() for value in values}
    | {f"rope_scaling {json.dumps(rope)}": ("config.json", json.dumps(CONFIG | {"rope_scaling": rope}))
       for rope in ROPES}
    | {f"{key} {json.dumps(value)}": ("config.json", json.dumps(CONFIG | {key: value}))
       for key in ("bos_token_id", "eos_token_id") for value in IDS}
    | {f"config of {what}": ("config.json", text) for what, text in TEXTS.items()}
    | {f"generation {json.dumps(values)}": ("generation_config.json", json.dumps(values)) for values in GENERATION}
    | {f"generation config of {what}": ("generation_config.json", text) for what, text in TEXTS.items()}
    | {
        "heads that do not divide": ("config.json", json.dumps(CONFIG | {"num_key_value_heads": 3})),
        "a layer more": ("config.json", json.dumps(CONFIG | {"num_hidden_layers": 3})),
        "a layer less": ("config.json", json.dumps(CONFIG | {"num_hidden_layers": 1})),
        "wider": ("config.json", json.dumps(CONFIG | {"hidden_size": 2 * HIDDEN})),
        "another vocabulary": ("config.json", json.dumps(CONFIG | {"vocab_size": 300})),
    }
)  # fmt: skip

MANIFESTS: dict[str, Any] = {
    "no fields": {},
    "another format": {"format": 99},
    "format of a text": {"format": str(FORMAT)},
    "no ranks": {"ranks": []},
    "ranks of a number": {"ranks": 10**9},
    "ranks of null": {"ranks": None},
    "a rank of a number": {"ranks": [5]},
    **{
        f"file {name!r}": {"ranks": [{"name": name, "num_bytes": 1, "header_sha256": "", "sha256": ""}]}
        for name in ("../rank-0.safetensors", "/dev/zero", "", ".", "rank-1.safetensors", 5, None, ["rank-0"], "a\0b")
    },
    **{
        f"{size!r} bytes": {
            "ranks": [{"name": "rank-0.safetensors", "num_bytes": size, "header_sha256": "", "sha256": ""}]
        }
        for size in (-1, 2.5, "10", True, None, 10**9, 2**60)
    },
    "a field too many": {"no_such": 1},
    "source of a number": {"source": 5},
    "a source of a text": {"source": ["x"]},
    "source with wrong types": {"source": [{"path": 5, "num_bytes": "x", "mtime_ns": None, "sha256": []}]},
    "held of a list": {"held": []},
    "held of an unknown setting": {"held": {"no_such": 1}},
    "held of an object": {"held": {"dtype": {}}},
    "spec of a list": {"spec": []},
    "stored of a number": {"stored": 5},
    "stored of lists": {"stored": {"a": []}},
    "layout of a text": {"layout": "1"},
    "version of a number": {"version": 1},
}


@pytest.mark.parametrize("variant", CASES)
def test_a_value_that_cannot_be_is_refused_by_file(variant: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    name, text = CASES[variant]
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusals(folder)
    assert said
    assert all(f"{name}" in line or "another model" in line for line in said), said


@pytest.mark.parametrize("variant", MANIFESTS)
def test_a_manifest_that_lies_is_refused_by_name(variant: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "rank-0.safetensors")
    rank = {"name": "rank-0.safetensors", "num_bytes": len(safetensors()), "header_sha256": "", "sha256": ""}
    sound = {
        "format": FORMAT,
        "layout": 1,
        "version": "0",
        "held": {},
        "spec": {},
        "stored": {},
        "source": [],
        "ranks": [rank],
    }
    (folder / MANIFEST).write_text(json.dumps(sound))
    assert refusals(folder) == []
    values = MANIFESTS[variant]
    (folder / MANIFEST).write_text(json.dumps(sound | values if values else values))
    said = refusals(folder)
    assert said
    assert all(MANIFEST in line or "rank-0.safetensors" in line for line in said)
