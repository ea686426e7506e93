"""Converted weights: the same bits as from their source, and nothing else is taken for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError, ConfigError, ModelNotFound
from allspan.protos.config.config_json import to_json
from allspan.protos.config.converted_manifest import MANIFEST, METADATA_GGUF, Manifest, read_manifest, sha256_of
from allspan.protos.config.settings import CacheConfig, ModelConfig, ServiceConfig, WorkerConfig
from allspan.protos.embeddings.card import embedding_card
from allspan.protos.text.tokenizers.gguf_metadata import read_header, read_metadata
from allspan.worker.cache.kv import KVCache
from allspan.worker.engine.weights import Weights
from allspan.worker.load import converted
from allspan.worker.load.loader import load_model, prepare
from allspan.worker.models.model import Model
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.tools.convert import convert, main
from support.threads import ThreadWorld
from support.tiny_gguf import save_gguf
from support.tiny_models import logits_on_ranks, prompt, save_tiny

PROMPTS = [prompt(21, 97), prompt(5, 97, 1)]


def make(source: Path, out: Path, ranks: int = 1, **weights: Any) -> Manifest:
    out.mkdir()
    model = ModelConfig(path=str(source), name="tiny", **weights)
    return convert(WorkerConfig(model, ServiceConfig(run_dir="/nowhere")), ranks, out)


def load(folder: Path, world: ThreadWorld | None = None, **weights: Any) -> Model:
    collectives = world.collectives[0] if world else LocalCollectives()
    config = ModelConfig(path=str(folder), name="tiny", **weights)
    return load_model(config, collectives, op_set("reference"), 16, 4, cache=CacheConfig(page_size=16))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder, "qwen2")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def once(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    make(tiny, out)
    return out


@pytest.fixture
def out(once: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(once, tmp_path / "out"))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("family", "held"),
    [
        ("llama", {"dtype": "float32"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        ("qwen2", {"quantization": "uint4", "quantization_group": 64}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_logits_are_those_of_the_source_bit_for_bit(
    family: str, held: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "source", family)
    make(tmp_path / "source", tmp_path / "out", ranks, **held)
    expected = logits_on_ranks(tmp_path / "source", ranks, PROMPTS, **held)
    found = logits_on_ranks(tmp_path / "out", ranks, PROMPTS)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_a_gguf_file_leaves_its_weights_and_its_metadata(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "source", "llama2", intermediate_size=96)
    source, out = tmp_path / "tiny.gguf", tmp_path / "out"
    save_gguf(source, model, GGMLQuantizationType.Q8_0)
    assert make(source, out, 2).held["quantization"] == "gguf"
    expected, found = logits_on_ranks(source, 2, PROMPTS), logits_on_ranks(out, 2, PROMPTS)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert read_metadata(out / METADATA_GGUF) == read_metadata(source)
    assert not read_header(out / METADATA_GGUF).tensors
    assert prepare(ModelConfig(str(out), "x"), CacheConfig(), 0, 2).source.spec.eos_token_ids == (2, 5)


def is_mapped(tensor: torch.Tensor, file: str) -> bool:
    """Whether a tensor lies in a mapping of the file."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    spans = [line.split()[0].split("-") for line in lines]
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in spans)


def test_weights_are_the_mapped_file_and_what_serving_needs_lies_beside_them(once: Path, tiny: Path) -> None:
    model = load(once)
    (rank,) = read_manifest(once).ranks
    known = load_file(once / rank.name)
    assert set(known) == set(model.weights)
    assert all(torch.equal(known[name], tensor) for name, tensor in model.weights.items())
    for tensor in model.weights.values():
        assert is_mapped(tensor, rank.name)
        assert tensor.data_ptr() % min(64, tensor.nbytes & -tensor.nbytes) == 0
    copied = {path.name for path in once.iterdir()}
    assert copied == {MANIFEST, rank.name, "config.json", "generation_config.json", "tokenizer_config.json"}


def test_with_several_memory_nodes_weights_are_copied(once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(once).weights
    monkeypatch.setattr(converted, "num_memory_nodes", lambda: 2)
    (rank,) = read_manifest(once).ranks
    progress: list[tuple[int, int]] = []
    config = ModelConfig(path=str(once), name="tiny")
    held = load_model(config, LocalCollectives(), op_set("reference"), 8, 1, lambda *at: progress.append(at)).weights
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name])
        assert not is_mapped(tensor, rank.name)
    assert progress[-1][0] == progress[-1][1]


def test_unloaded_weights_come_back_from_the_path_with_what_lies_there_by_then(out: Path, tmp_path: Path) -> None:
    model = load(out)
    first = {name: tensor.clone() for name, tensor in model.weights.items()}
    places = {name: tensor.data_ptr() for name, tensor in model.weights.items()}
    kv = KVCache(model.cache_groups[0].spec, 8)
    model.bind_cache(kv)
    config = ModelConfig(path=str(out), name="tiny")
    weights = Weights(model, config, CacheConfig(page_size=16), LocalCollectives(), (*kv.keys, *kv.values))
    weights.unload()
    weights.reload(lambda: None)
    assert all(torch.equal(model.weights[name], tensor) for name, tensor in first.items())
    save_tiny(tmp_path / "other", "qwen2", initializer_range=0.5)
    source = load_file(tmp_path / "other" / "model.safetensors")
    source["model.norm.weight"] += 1
    save_file(source, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    shutil.rmtree(out)
    make(tmp_path / "other", out)
    weights.unload()
    weights.reload(lambda: None)
    assert torch.equal(model.weights["norm.weight"], first["norm.weight"] + 1)
    assert {name: tensor.data_ptr() for name, tensor in model.weights.items()} == places


def change(out: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((out / MANIFEST).read_text())
    edit(values)
    (out / MANIFEST).write_text(json.dumps(values))


def cut(out: Path) -> None:
    file = out / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def rename_a_tensor(out: Path, told: bool) -> None:
    """In the file's header; the manifest is told the new hash, or not."""
    file = out / "rank-0.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"layers.0.o.weight"', b'"layers.0.x.weight"'))
    length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    if told:
        change(out, lambda values: values["ranks"][0].update(header_sha256=sha256_of(file, length)))


def retype_a_tensor(out: Path) -> None:
    file = out / "rank-0.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype":"U8"', b'"dtype":"I8"', 1))
    length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    change(out, lambda values: values["ranks"][0].update(header_sha256=sha256_of(file, length)))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "another layout": (
        lambda out: change(out, lambda values: values.update(layout=999)),
        r"packed in layout 999 \(allspan .*\), this version reads layout \d+: convert the model again",
    ),
    "another format": (lambda out: change(out, lambda values: values.update(format=7)), r"format is 7, .* reads 1"),
    "another spec": (
        lambda out: change(out, lambda values: values["spec"].update(logit_softcap=30.0)),
        r"described the model otherwise .*\(logit_softcap\)",
    ),
    "a spec without layers": (
        lambda out: change(out, lambda values: values["spec"].update(layers=None, num_layers=2, qkv_bias=False)),
        r"described the model otherwise .*\(layers, num_layers, qkv_bias\): convert the model again",
    ),
    "another family": (
        lambda out: change(out, lambda values: values["spec"].update(family="gpt2")),
        r"model_type 'gpt2' is not supported",
    ),
    "no ranks": (lambda out: change(out, lambda values: values.update(ranks=[])), "not a manifest"),
    "another setting": (
        lambda out: change(out, lambda values: values["held"].update(sparsity=2)),
        "not a manifest .* held has 'sparsity', which is none of dtype, quantization",
    ),
    "a rank's file elsewhere": (
        lambda out: change(out, lambda values: values["ranks"][0].update(name="../x.safetensors")),
        r"name is '../x.safetensors'",
    ),
    "no manifest": (lambda out: (out / MANIFEST).write_text("{"), "cannot be read as JSON"),
    "no file": (lambda out: (out / "rank-0.safetensors").unlink(), r"rank-0\.safetensors: cannot be read"),
    "truncated": (cut, r"rank-0\.safetensors: truncated: it has \d+ bytes, its manifest says \d+"),
    "altered header": (lambda out: rename_a_tensor(out, told=False), "altered: its header"),
    "foreign tensor": (lambda out: rename_a_tensor(out, told=True), r"'layers\.0\.x\.weight' is not part of the model"),
    "foreign type": (retype_a_tensor, r"is I8 \[.*\], this version holds it as U8"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_stale_or_foreign_is_refused_with_the_reason(what: str, out: Path) -> None:
    spoil, words = SPOILT[what]
    spoil(out)
    with pytest.raises(CheckpointError, match=words):
        load(out)


def test_a_missing_tensor_is_named(out: Path) -> None:
    change(out, lambda values: values["spec"]["layers"][0].update(count=3))
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.2\..*' is missing"):
        load(out)


def test_altered_content_is_found_when_it_is_looked_for(out: Path) -> None:
    load(out, verify=True)
    file = out / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    load(out)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: altered: its content"):
        load(out, verify=True)


def test_other_settings_than_it_holds_are_refused(once: Path) -> None:
    load(once, dtype="float32", quantization="none")
    with pytest.raises(ConfigError, match="holds weights with dtype float32, --dtype is bfloat16: leave it out"):
        load(once, dtype="bfloat16")
    with pytest.raises(ConfigError, match="with quantization none, --quantization is other"):
        load(once, quantization="other")
    with pytest.raises(ConfigError, match=r"holds weights for 1 rank, --ranks is 2: pass --ranks 1, or convert"):
        load(once, ThreadWorld(2))


def test_a_group_that_a_method_takes_by_itself_may_be_asked_for(tiny: Path, tmp_path: Path) -> None:
    assert make(tiny, tmp_path / "out", quantization="uint4").held["quantization_group"] == 32
    load(tmp_path / "out", quantization="uint4", quantization_group=32)
    with pytest.raises(ConfigError, match="with quantization_group 32, --quantization-group is 64"):
        load(tmp_path / "out", quantization_group=64)


def test_a_source_that_changed_since_makes_it_stale_and_one_that_is_gone_does_not(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    file = source / "model.safetensors"
    make(source, tmp_path / "out")
    file.touch()
    load(tmp_path / "out")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"out is stale: .*model\.safetensors, .* --overwrite"):
        load(tmp_path / "out")
    shutil.rmtree(source)
    load(tmp_path / "out")


def test_what_was_converted_is_not_converted_again(once: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is converted already"):
        make(once, tmp_path / "again")


def test_a_full_disk_is_told_before_anything_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"takes \d+ bytes, .* has 1000 free"):
        make(tiny, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_is_copied_needs_room_too(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    (source / "tokenizer.json").write_bytes(bytes(9 << 20))
    usage = shutil.disk_usage(tmp_path)._replace(free=8 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    make(tiny, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"takes \d+ bytes, .* has 8388608 free"):
        make(source, tmp_path / "b")


def test_how_a_model_pools_is_kept(tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (source / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]')
    make(source, tmp_path / "out")
    assert embedding_card(tmp_path / "out") == embedding_card(source)
    assert embedding_card(source).pooling == "mean"


def test_random_weights_can_be_converted(tiny: Path, tmp_path: Path) -> None:
    manifest = make(tiny, tmp_path / "out", load_format="dummy")
    assert manifest.source == ()
    expected = logits_on_ranks(tiny, 1, PROMPTS, load_format="dummy")
    found = logits_on_ranks(tmp_path / "out", 1, PROMPTS)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_the_process_prints_one_json_object(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: WorkerConfig, out: Path, ranks: int) -> tuple[int, Any]:
        out.mkdir()
        path = tmp_path / "config.json"
        path.write_text(to_json(config))
        code = main([str(path), "--ranks", str(ranks), "--into", str(out)])
        return code, json.loads(capsys.readouterr().out)

    config = WorkerConfig(ModelConfig(str(tiny), "tiny"), ServiceConfig(run_dir="/nowhere"))
    code, said = run(config, tmp_path / "a", 2)
    assert code == 0
    assert [rank["name"] for rank in said["ranks"]] == ["rank-0.safetensors", "rank-1.safetensors"]
    code, said = run(config, tmp_path / "b", 100)
    assert code == 1
    assert (said["error"], "100" in said["message"]) == (ConfigError.code, True)
    code, said = run(replace(config, model=replace(config.model, path="/nowhere/x")), tmp_path / "c", 1)
    assert (code, said["error"]) == (1, ModelNotFound.code)


def test_a_disk_that_fails_is_named_by_what_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(source: Path, out: Path) -> None:
        raise OSError(28, "No space left on device", str(source), None, str(out))

    monkeypatch.setattr(shutil, "copyfile", full)
    config = WorkerConfig(ModelConfig(str(tiny), "tiny"), ServiceConfig(run_dir="/nowhere"))
    (tmp_path / "config.json").write_text(to_json(config))
    (tmp_path / "out").mkdir()
    assert main([str(tmp_path / "config.json"), "--ranks=1", "--into", str(tmp_path / "out")]) == 1
    assert json.loads(capsys.readouterr().out)["message"] == f"{tmp_path}/out/config.json: No space left on device"


def test_an_instruction_set_that_cannot_be_had_is_a_setting_that_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("allspan.kernels.cpu._native")
    monkeypatch.setenv("ALLSPAN_ISA", "sve9")
    with pytest.raises(ConfigError, match="ALLSPAN_ISA: 'sve9' cannot run here"):
        make(tiny, tmp_path / "out")
