"""GGUF files that lie about counts, lengths, types and places: refused before anything is built of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf as reference
import pytest

from allspan.protos.model_files.gguf_types import BLOCKS
from support.hostile_models import Gguf, gguf, refusals, string

BIG = (10**9, 2**31 - 1, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1)


def counted(tensors: int | None = None, keys: int | None = None) -> bytes:
    file = gguf()
    file.counts = [tensors, keys]
    return file.bytes()


def with_key(value: bytes) -> bytes:
    """One more key, whose value is written as it is given, with its type."""
    return gguf({"spoilt": value}).bytes()


def with_tensor(*dims: int, offset: int = 0, kind: int = 0, num_dims: int | None = None, name: str = "spoilt") -> bytes:
    file = gguf()
    file.tensor(name, dims, offset, kind, num_dims)
    return file.bytes()


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + data


def moved(**places: int) -> bytes:
    """The sound file's tensors, some of them at other offsets."""
    file = Gguf()
    file.keys = gguf().keys
    for name in ("token_embd.weight", "output.weight", "output_norm.weight"):
        file.tensor(name, (8, 256) if name != "output_norm.weight" else (8,), places.get(name.split(".")[0], 0))
    file.data = bytes(3 * 8 * 256 * 4)
    return file.bytes()


SOUND = gguf().bytes()
VARIANTS: dict[str, bytes | Callable[[], bytes]] = {
    "empty": b"",
    "one byte": b"G",
    "magic alone": b"GGUF",
    "other magic": Gguf(magic=b"FUGG").bytes(),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    **{f"version {v}": Gguf(version=v).bytes() for v in (0, 1, 4, 2**32 - 1)},
    **{f"{n} tensors": counted(tensors=n) for n in BIG},
    **{f"{n} keys": counted(keys=n) for n in BIG},
    **{f"key of {n} bytes": (lambda n=n: spoil_key_length(n)) for n in BIG},
    **{f"string of {n} bytes": with_key(struct.pack("<I", 8) + string("x", n)) for n in BIG},
    **{f"{n} strings": with_key(array(8, n)) for n in BIG},
    **{f"{n} bytes": with_key(array(0, n)) for n in BIG},
    **{f"{n} doubles": with_key(array(12, n)) for n in BIG},
    **{f"string of {n} bytes in a list": with_key(array(8, 1, string("x", n))) for n in BIG},
    **{f"value of type {t}": with_key(struct.pack("<I", t)) for t in (13, 255, 2**31, 2**32 - 1)},
    **{f"list of type {t}": with_key(array(t, 1, bytes(16))) for t in (9, 13, 2**32 - 1)},
    "a million strings that are not there": with_key(array(8, 10**6, bytes(8) * 1000)),
    "key twice": gguf().key("llama.block_count", 2).bytes(),
    **{f"alignment {a}": gguf({"general.alignment": a}).bytes() for a in (0, 3, 48, 2**31, 2**32 - 1, 2**60)},
    "alignment of a text": gguf({"general.alignment": "32"}).bytes(),
    "alignment of a fraction": gguf({"general.alignment": 32.0}).bytes(),
    "alignment true": gguf({"general.alignment": True}).bytes(),
    **{f"size {n}": with_tensor(n) for n in (0, *BIG)},
    **{f"sizes {n} squared": with_tensor(n, n) for n in BIG},
    **{f"{n} sizes": with_tensor(8, num_dims=n) for n in (0, 5, 9, 10**9, 2**32 - 1)},
    **{f"offset {n}": with_tensor(8, offset=n) for n in (1, 31, *BIG, 2**64 - 32)},
    **{f"type {t}": with_tensor(256, kind=t) for t in (4, 5, 199, 2**31, 2**32 - 1)},
    "half a block": with_tensor(33, kind=8),
    "tensor twice": with_tensor(8, name="output_norm.weight"),
    "tensor over another": with_tensor(8, 8, offset=32, name="blk.0.spoilt.weight"),
    "two at one place": moved(output=0, output_norm=0),
    "half over another": moved(output=4096, output_norm=3 * 8192),
    "behind the end": moved(output=8192, output_norm=2**40),
    "long tensor name": with_tensor(8, name="n" * 70_000),
    "architecture of a number": gguf({"general.architecture": 7}).bytes(),
    "layers of a fraction": gguf({"llama.block_count": 2.5}).bytes(),
    "layers of a text": gguf({"llama.block_count": "2"}).bytes(),
    **{f"{n} layers": gguf({"llama.block_count": n}).bytes() for n in (0, 3, 2**20, 2**31, 2**60)},
    **{f"{n} heads": gguf({"llama.attention.head_count": n}).bytes() for n in (0, 2**20, 2**60)},
    "heads that do not divide": gguf({"llama.attention.head_count": 3, "llama.attention.head_count_kv": 2}).bytes(),
    **{f"context {n}": gguf({"llama.context_length": n}).bytes() for n in (0, 10**9, 10**18)},
    **{f"embedding {n}": gguf({"llama.embedding_length": n}).bytes() for n in (0, 9, 2**40)},
    **{f"feed-forward {n}": gguf({"llama.feed_forward_length": n}).bytes() for n in (0, 2**40)},
    **{f"rope base {v}": gguf({"llama.rope.freq_base": v}).bytes() for v in (0.0, -1.0, float("inf"), float("nan"))},
    "norm epsilon 5": gguf({"llama.attention.layer_norm_rms_epsilon": 5.0}).bytes(),
    "no vocabulary": gguf({"tokenizer.ggml.tokens": None}).bytes(),
    "vocabulary of numbers": gguf({"tokenizer.ggml.tokens": [1, 2]}).bytes(),
    "vocabulary of a text": gguf({"tokenizer.ggml.tokens": "abc"}).bytes(),
    "few types": gguf({"tokenizer.ggml.token_type": [1]}).bytes(),
    **{f"first id {n}": gguf({"tokenizer.ggml.bos_token_id": n}).bytes() for n in (256, 10**9, 2**60)},
    **{f"last id {n}": gguf({"tokenizer.ggml.eos_token_id": n}).bytes() for n in (256, 10**9, 2**60)},
    "first id of a text": gguf({"tokenizer.ggml.bos_token_id": "0"}).bytes(),
    "merges of nothing": gguf({"tokenizer.ggml.merges": ["x y", "no such"]}).bytes(),
    "merges of numbers": gguf({"tokenizer.ggml.merges": [1]}).bytes(),
    "unknown tokenizer": gguf({"tokenizer.ggml.model": "bert\x1b[2J\n"}).bytes(),
    "unknown pre-tokenizer": gguf({"tokenizer.ggml.pre": "x" * 10**6}).bytes(),
    "template of 20 MB": lambda: gguf({"tokenizer.chat_template": "x" * 20_000_000}).bytes(),
    "template of 2 MB": lambda: gguf({"tokenizer.chat_template": "x" * 2_000_000}).bytes(),
    "template of a number": gguf({"tokenizer.chat_template": 5}).bytes(),
    "token of 100,000 characters": gguf({"tokenizer.ggml.tokens": ["t" * 100_000] * 4}).bytes(),
    "control tokens alone": lambda: control_tokens(20_000),
    "more tokens than rows": gguf({"tokenizer.ggml.tokens": ["t"] * 300, "tokenizer.ggml.token_type": None}).bytes(),
    **{f"first {n} bytes": SOUND[:n] for n in (5, 8, 12, 23, 24, 40, 100, 1000, 3000, len(SOUND) // 2, len(SOUND) - 1)},
}


def spoil_key_length(length: int) -> bytes:
    at = SOUND.index(b"general.architecture") - 8
    return SOUND[:at] + struct.pack("<Q", length) + SOUND[at + 8 :]


def control_tokens(count: int) -> bytes:
    tokens = [f"<{i}>" for i in range(count)]
    return gguf({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * count}, tensors=False).bytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_that_lies_is_refused_by_name_soon_and_with_little_memory(variant: str, tmp_path: Path) -> None:
    made = VARIANTS[variant]
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(made if isinstance(made, bytes) else made())
    said = refusals(path)
    assert said
    assert all("spoilt.gguf" in line for line in said)


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "sound.gguf").write_bytes(SOUND)
    assert refusals(tmp_path / "sound.gguf") == []


def test_every_prefix_and_every_spoilt_byte_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "spoilt.gguf"
    header = SOUND[: SOUND.index(b"tokenizer.ggml.tokens")]
    for at in range(0, len(header), 7):
        path.write_bytes(SOUND[:at])
        assert refusals(path)
        for value in (0, 0x7F, 0xFF):
            path.write_bytes(SOUND[:at] + bytes([value]) + SOUND[at + 1 :])
            refusals(path)


def test_the_sizes_of_types_are_ggmls() -> None:
    assert {kind.value: sizes for kind, sizes in reference.GGML_QUANT_SIZES.items()} == BLOCKS
