"""Files of torch.save that lie or would act: refused by file, and nothing of them runs."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.protos.model_files.weight_files import read_tensors
from support.hostile_models import SHAPES, refusals, save_sound

NORM = "model.norm.weight"
ACTED: list[str] = []
"""What a pickle did that could."""


def act(*arguments: object, **named: object) -> None:
    ACTED.append(str(arguments))


def state() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


SOUND = saved(state())


def archive(changes: dict[str, bytes | None] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """The sound archive but for records that are replaced, added or (None) left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(SOUND)) as sound, zipfile.ZipFile(out, "w", method) as made:
        records = {name: sound.read(name) for name in sound.namelist()} | (changes or {})
        for name, data in records.items():
            if data is not None:
                made.writestr(name, data)
    return out.getvalue()


def pickled(data: bytes) -> bytes:
    """An archive with this pickle."""
    return archive({"archive/data.pkl": data})


class Calls:
    """Unpickles as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._made = function, arguments

    def __reduce__(self) -> Any:
        return self._made


class WithState:
    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), {"__class__": 1, "a": 2}


class WithItems:
    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), None, None, iter([("a", Calls(act, "item"))])


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


PERSISTENT = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x08tQ"
"""Storage 0 of 8 elements."""


def tensor(
    shape: bytes = b"K\x08\x85", stride: bytes = b"K\x01\x85", first: bytes = b"K\x00", more: bytes = b""
) -> bytes:
    """A dict with one tensor."""
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + PERSISTENT + first + shape + stride + b"\x89}" + more + b"tR"
    return opcodes(b"}" + text(NORM) + made + b"s")


ACTING: dict[str, bytes] = {
    **{
        f"protocol {protocol} calls {function.__module__}.{function.__name__}": pickle.dumps(
            {"a": Calls(function, *arguments)}, protocol
        )
        for protocol in range(6)
        for function, arguments in (
            (act, ("called",)), (os.system, ("true",)), (eval, ("1",)), (getattr, ("", "join")), (open, ("/dev/null",)),
        )
    },
    "a call in items of a dict": pickle.dumps(WithItems(), 2),
    "a call in a list": pickle.dumps([Calls(act)], 2),
    "a state for a dict": pickle.dumps(WithState(), 2),
    "GLOBAL": opcodes(b"cos\nsystem\n"),
    "GLOBAL of the right module": opcodes(b"ctorch\nload\n"),
    "GLOBAL of a nested name": opcodes(b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n"),
    "STACK_GLOBAL": opcodes(text("os") + text("system") + b"\x93"),
    "STACK_GLOBAL of numbers": opcodes(b"K\x01K\x02\x93"),
    "INST": opcodes(b"(" + text("true") + b"ios\nsystem\n"),
    "OBJ": opcodes(b"(cos\nsystem\n" + text("true") + b"o"),
    "NEWOBJ": opcodes(b"cos\nsystem\n" + b")\x81"),
    "NEWOBJ_EX": opcodes(b"ccollections\nOrderedDict\n)}\x92"),
    "EXT1": opcodes(b"\x82\x01"),
    "EXT4": opcodes(b"\x84\x01\x00\x00\x00"),
    "PERSID": opcodes(b"P0\n"),
    "REDUCE of a number": opcodes(b"K\x01)R"),
    "REDUCE of a storage's class": opcodes(b"ctorch\nFloatStorage\n)R"),
    "REDUCE of a dict with arguments": opcodes(b"ccollections\nOrderedDict\n]\x85R"),
    "BUILD of a tensor": tensor()[:-2] + b"}" + text("__setstate__") + b"K\x01sbs.",
    "BUILD of a dict": opcodes(b"}}" + text("__class__") + b"K\x01sb"),
    "NEXT_BUFFER": opcodes(b"\x97"),
    "BYTEARRAY8": opcodes(b"\x96" + struct.pack("<Q", 2**62)),
}  # fmt: skip
"""Pickles that would do something where they are unpickled, by what they hold."""

LYING: dict[str, bytes] = {
    "no pickle": b"",
    "no STOP": opcodes(b"}")[:-1],
    "empty stack": opcodes(),
    "two values": opcodes(b"}}"),
    "a list": opcodes(b"]"),
    "a number for a tensor": opcodes(b"}" + text(NORM) + b"K\x01s"),
    "a dict for a tensor": opcodes(b"}" + text("model") + b"}s"),
    "a number for a name": opcodes(b"}K\x01K\x01s"),
    "POP_MARK": opcodes(b"(1"),
    "a mark alone": opcodes(b"("),
    "no mark": opcodes(b"t"),
    "a memo that is not there": opcodes(b"h\x07"),
    "a memo far away": opcodes(b"}r\xff\xff\xff\xff"),
    "a text of 4 GB": opcodes(b"X\xff\xff\xff\xff"),
    "a number of many bytes": opcodes(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "millions of marks": opcodes(b"(" * 5_000_000),
    "nested tuples": opcodes(b"}" + text("a") + b")" + b"2\x86" * 60 + b"s"),
    "tuples of tuples": opcodes(b"}" + text("a") + b")q\x00" + b"h\x00h\x00\x86q\x00" * 100 + b"s"),
    "a dict in itself": opcodes(b"}q\x00" + text("a") + b"h\x00s"),
    "a list in itself": opcodes(b"]q\x00h\x00a"),
    "shape beyond the storage": tensor(shape=b"K\x09\x85"),
    "begins beyond the storage": tensor(first=b"K\x01"),
    "first element below 0": tensor(first=b"J\xff\xff\xff\xff"),
    "shape below 0": tensor(shape=b"J\xff\xff\xff\xff\x85"),
    "shape of a billion twice": tensor(shape=b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86", stride=b"K\x00K\x00\x86"),
    "stride 0": tensor(stride=b"K\x00\x85"),
    "stride 2": tensor(shape=b"K\x04\x85", stride=b"K\x02\x85"),
    "transposed": tensor(shape=b"K\x02K\x04\x86", stride=b"K\x01K\x02\x86"),
    "fewer strides": tensor(shape=b"K\x02K\x04\x86"),
    "shape of a fraction": tensor(shape=b"G" + struct.pack(">d", 8.0) + b"\x85"),
    "shape of a list": tensor(shape=b"]"),
    "shape of true": tensor(shape=b"\x88\x85"),
    "nine dimensions": tensor(shape=b"(" + b"K\x01" * 9 + b"t", stride=b"(" + b"K\x01" * 9 + b"t"),
    "too many arguments": tensor(more=b"NNN"),
    "a storage that is missing": tensor().replace(text("0"), text("9" * 9)),
    "a storage of another length": tensor().replace(b"K\x08tQ", b"K\x07tQ"),
    "a storage above the folder": tensor().replace(text("0"), text("../data.pkl")),
    "a storage of no class": tensor().replace(b"ctorch\nFloatStorage\n", text("FloatStorage")),
    "a persistent id of a number": opcodes(b"K\x01Q"),
    "a name twice": opcodes(tensor()[2:-1] + tensor()[3:-1]),
    "a long name": tensor().replace(text(NORM), text("n" * 100_000)),
}


def patched(magic: bytes, at: int, value: bytes, last: bool = False) -> bytes:
    """The sound archive with bytes of one of its structures replaced: the first of its kind, or the last."""
    where = (SOUND.rfind if last else SOUND.find)(magic) + at
    return SOUND[:where] + value + SOUND[where + len(value) :]


END, ENTRY, RECORD = b"PK\x05\x06", b"PK\x01\x02", b"PK\x03\x04"


def at_64_bits(offset: int) -> bytes:
    """An archive whose first record is said to begin there, in the 64 bits of an extra field."""
    data = archive()
    entry, end = data.index(ENTRY), data.rindex(END)
    name_bytes = struct.unpack_from("<H", data, entry + 28)[0]
    behind = entry + 46 + name_bytes
    extra = struct.pack("<HHQ", 1, 8, offset)
    head = bytearray(data[entry:behind])
    head[30:32], head[42:46] = struct.pack("<H", len(extra)), b"\xff" * 4
    tail = bytearray(data[end:])
    tail[12:16] = struct.pack("<I", end - entry + len(extra))
    return data[:entry] + bytes(head) + extra + data[behind:end] + bytes(tail)


ARCHIVES: dict[str, bytes] = {
    **{f"begins at byte {offset}": at_64_bits(offset) for offset in (2**62, 2**63, 2**64 - 1)},
    "empty": b"",
    "zeros": bytes(1000),
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a pickle": pickle.dumps({"a": 1}, 2),
    "an old file of torch": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
    "compressed": archive(method=zipfile.ZIP_DEFLATED),
    "no pickle": archive({"archive/data.pkl": None}),
    "two pickles": archive({"other/data.pkl": b"."}),
    "big endian": archive({"archive/byteorder": b"big"}),
    "a long byteorder": archive({"archive/byteorder": bytes(1 << 20)}),
    "a storage is missing": archive({"archive/data/0": None}),
    "a storage is short": archive({"archive/data/0": b"1234"}),
    "a comment": SOUND[:-2] + b"\x01\x00x",
    "many entries": patched(END, 10, b"\xfe\xff"),
    "no entries": patched(END, 8, b"\x00\x00\x00\x00"),
    "a long directory": patched(END, 12, struct.pack("<I", 2**31)),
    "a directory elsewhere": patched(END, 16, struct.pack("<I", 8)),
    "a directory behind the end": patched(END, 16, struct.pack("<I", 2**32 - 2)),
    "64 bits that are not there": archive()[:-6] + b"\xff\xff\xff\xff\x00\x00",
    "encrypted": patched(ENTRY, 8, b"\x01\x00"),
    "sizes differ": patched(ENTRY, 20, struct.pack("<I", 1)),
    "a size of 64 bits that is not there": patched(ENTRY, 20, b"\xff" * 8),
    "a long name": patched(ENTRY, 28, b"\xff\xff"),
    "a record elsewhere": patched(ENTRY, 42, struct.pack("<I", 10)),
    "over another": patched(ENTRY, 42, struct.pack("<I", 0), last=True),
    "another name in the record": patched(RECORD, 30, b"X"),
    "a long name in the record": patched(RECORD, 26, b"\xff\xff"),
    **{f"first {n} bytes": SOUND[:n] for n in (1, 4, 100, len(SOUND) // 2, len(SOUND) - 30, len(SOUND) - 1)},
}


def folder_with(data: bytes, path: Path) -> Path:
    folder = save_sound(path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    return folder


@pytest.mark.parametrize("variant", [*ACTING, *LYING, *ARCHIVES])
def test_a_torch_file_that_lies_is_refused_and_does_nothing(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "system", act)
    data = ARCHIVES[variant] if variant in ARCHIVES else pickled({**ACTING, **LYING}[variant])
    said = refusals(folder_with(data, tmp_path / "model"))
    assert said
    assert all("pytorch_model.bin" in line for line in said)
    assert not ACTED


def test_any_damaged_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    draw = random.Random(7)
    folder = folder_with(SOUND, tmp_path / "model")
    assert not refusals(folder)
    begin = SOUND.index(b"data.pkl") + 8
    for _ in range(300):
        data = bytearray(SOUND)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(begin, begin + 900) if draw.random() < 0.5 else draw.randrange(len(data))
            data[at] = draw.randrange(256)
        (folder / "pytorch_model.bin").write_bytes(data)
        refusals(folder)
    assert not ACTED


@pytest.mark.parametrize("file", ["../pytorch_model.bin", "/dev/zero", "model.safetensors", "no.bin", "", 5, None])
def test_an_index_of_torch_files_that_lies_is_refused(file: object, tmp_path: Path) -> None:
    folder = folder_with(SOUND, tmp_path / "model")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {NORM: file}}))
    said = refusals(folder)
    assert said
    assert all("pytorch_model.bin.index.json" in line or "no.bin" in line for line in said)


def test_a_sound_torch_file_is_read_to_the_last_tensor(tmp_path: Path) -> None:
    found = read_tensors(folder_with(SOUND, tmp_path / "model"))
    assert {name: stored.shape for name, (_, stored) in found.items()} == SHAPES
