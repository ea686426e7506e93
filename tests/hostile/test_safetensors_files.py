"""Safetensors files and indices that lie: refused by file and tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from support.hostile_models import SHAPES, entries, refusals, safetensors, save_sound

NORM = "model.norm.weight"
SOUND = safetensors()
BIG = (10**9, 2**31, 2**53, 2**60, 2**63, 10**30)


def entry(**fields: object) -> bytes:
    """The sound file but for fields of one entry; None leaves one out."""
    header = entries()
    header[NORM] = {key: value for key, value in (header[NORM] | fields).items() if value is not None}
    return safetensors(header)


def offsets(begin: object, end: object) -> bytes:
    return entry(data_offsets=[begin, end])


def raw(text: str) -> bytes:
    """One entry's text in place of the sound one's."""
    return safetensors(json.dumps(entries()).replace(json.dumps(entries()[NORM]), text).encode())


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "zeros": bytes(1000),
    **{f"header of {n} bytes": struct.pack("<Q", n % 2**64) + SOUND[8:] for n in (*BIG, 2**64 - 1)},
    "header of no bytes": safetensors(b""),
    "header longer by one": safetensors(length=len(json.dumps(entries())) + 1),
    "header shorter by one": safetensors(length=len(json.dumps(entries())) - 1),
    "header is a list": safetensors([]),
    "header is a number": safetensors(7),
    "header is null": safetensors(b"null"),
    "header is no UTF-8": safetensors(b'{"\xff": 1}'),
    "header with a byte order mark": safetensors(b"\xef\xbb\xbf{}"),
    "deep header": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "deep entry": safetensors(b'{"a":' * 900 + b"1" + b"}" * 900),
    "five million values": safetensors(b'{"a":[' + b"1," * 5_000_000 + b"1]}"),
    "dtype missing": entry(dtype=None),
    "shape missing": entry(shape=None),
    "offsets missing": entry(data_offsets=None),
    **{f"dtype {json.dumps(d)}": entry(dtype=d) for d in ("f32", "FLOAT", "", "F32 ", 7, ["F32"], {}, True)},
    **{f"size {n}": entry(shape=[n]) for n in (-1, 0, 2.5, 8.0, "8", True, *BIG)},
    **{f"size {n} twice": entry(shape=[n, n]) for n in BIG},
    "shape of a number": entry(shape=8),
    "shape of a text": entry(shape="8"),
    "a thousand sizes": entry(shape=[1] * 1000),
    "nested shape": entry(shape=[[8]]),
    **{f"offsets {a} to {b}": offsets(a, b) for a, b in ((-32, 0), (32, 0), (0, 31), (0, 2**60), (2**60, 2**60 + 32))},
    **{f"offsets {json.dumps(a)}": offsets(a, 32) for a in (0.0, "0", True, [0], 1e400)},
    "three offsets": entry(data_offsets=[0, 16, 32]),
    "offsets of a number": entry(data_offsets=32),
    "entry is a list": raw("[]"),
    "entry is null": raw("null"),
    "entry twice": safetensors(json.dumps(entries())[:-1].encode() + b',"model.norm.weight":{}}'),
    "not a number": raw('{"dtype": "F32", "shape": [NaN], "data_offsets": [0, 32]}'),
    "infinite": raw('{"dtype": "F32", "shape": [8], "data_offsets": [0, Infinity]}'),
    "1e400": raw('{"dtype": "F32", "shape": [8], "data_offsets": [0, 1e400]}'),
    "over another": offsets(0, 32),
    "half over another": offsets(16, 48),
    "a hole": safetensors(data=bytes(sum(map(len, [SOUND])))),
    "bytes behind the last": SOUND + b"x",
    "half a surrogate": raw('{"dtype": "\\ud800", "shape": [8], "data_offsets": [0, 32]}'),
    "long name": safetensors({"n" * 100_000: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, data=bytes(4)),
    **{f"first {n} bytes": SOUND[:n] for n in (1, 8, 9, 100, 1000, len(SOUND) // 2, len(SOUND) - 1)},
}


def weight_map(value: Any) -> str:
    return json.dumps({"metadata": {}, "weight_map": value})


INDICES: dict[str, str | bytes] = {
    "empty": "",
    "a list": "[]",
    "null": "null",
    "no map": "{}",
    "map of a list": weight_map([]),
    "empty map": weight_map({}),
    "map of a number": weight_map(5),
    "file of a number": weight_map({NORM: 5}),
    "file of a list": weight_map({NORM: ["model.safetensors"]}),
    "file of null": weight_map({NORM: None}),
    **{
        f"file {json.dumps(name)}": weight_map({NORM: name})
        for name in (
            "",
            ".",
            "..",
            "/etc/passwd",
            "/dev/zero",
            "../model.safetensors",
            "a/model.safetensors",
            "config.json",
            "no.safetensors",
            "x\u0000.safetensors",
            "x\n.safetensors",
            "n" * 5000 + ".safetensors",
        )
    },
    "a tensor that is not there": weight_map({"no.such": "model.safetensors"}),
    "twice": '{"weight_map": {}, "weight_map": {}}',
    "deep": '{"weight_map": ' + "[" * 5000 + "]" * 5000 + "}",
    "infinite": '{"weight_map": {"a": Infinity}}',
    "no UTF-8": b'{"weight_map": {"\xff": "model.safetensors"}}',
    "80 MB": b'{"weight_map": {"a": "' + b"x" * 80_000_000 + b'"}}',
    "cut": weight_map(dict.fromkeys(SHAPES, "model.safetensors"))[:100],
}


@pytest.mark.parametrize("variant", HEADERS)
def test_a_file_that_lies_is_refused_by_name(variant: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(HEADERS[variant])
    said = refusals(folder)
    assert said
    assert all("model.safetensors" in line for line in said)


@pytest.mark.parametrize("variant", INDICES)
def test_an_index_that_lies_is_refused_by_name(variant: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    text = INDICES[variant]
    (folder / "model.safetensors.index.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusals(folder)
    assert said
    assert all("model.safetensors.index.json" in line for line in said)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(SOUND)
    (said,) = refusals(folder)
    assert "b.safetensors" in said
    assert "a.safetensors, too" in said


def test_a_sound_folder_is_read(tmp_path: Path) -> None:
    assert refusals(save_sound(tmp_path / "model")) == []
