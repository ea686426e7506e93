"""Hugging Face folders: slices, and damaged, missing or misfitting files named precisely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError
from allspan.protos.config.settings import ModelConfig
from allspan.worker.load.loader import load_model
from allspan.worker.weights.tensor_folder import TensorFolder
from support.threads import ThreadWorld
from support.tiny_models import save_tiny


def refusal(folder: Path, size: int = 1) -> str:
    """The one line with which loading ends."""
    config = ModelConfig(path=str(folder), name="tiny")
    with pytest.raises(CheckpointError) as caught:
        load_model(config, ThreadWorld(size).collectives[0], op_set("reference"), 8, 1)
    assert "\n" not in caught.value.message
    return caught.value.message


def edited(folder: Path, **changes: torch.Tensor | None) -> Path:
    """The folder with tensors of its file replaced, added or (None) removed."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {key: value for key, value in changes.items() if value is not None}
    save_file({key: value for key, value in tensors.items() if changes.get(key, value) is not None}, path)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_slice_is_converted_into_the_target(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randn(7, 9).to(dtype)
    save_file({"a": whole, "b": torch.arange(3).to(dtype)}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    out = torch.empty(3, 4)
    folder.read("a", [range(2, 5), range(1, 5)], out)
    assert torch.equal(out, whole[2:5, 1:5].float())
    folder.release()
    vector = torch.empty(2, dtype=torch.bfloat16)
    folder.read("b", [range(1, 3)], vector)
    assert vector.tolist() == [1, 2]


def test_data_that_lies_unaligned_is_read(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.float32)
    header = json.dumps({"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    header += b" " * (3 - len(header) % 4)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    out = torch.empty(2)
    TensorFolder(tmp_path).read("a", [range(3, 5)], out)
    assert out.tolist() == [3, 4]


def test_a_truncated_file_names_tensor_and_sizes(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    message = refusal(tmp_path)
    assert message.startswith(f"{path}: truncated: tensor 'model.")
    assert f"ends at byte {len(data)}, but the file has {len(data) - 100} bytes" in message


@pytest.mark.parametrize("length", [0, 5, 8, 100])
def test_a_file_cut_within_its_header_is_refused(length: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_damaged_header_is_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*(header|does not fit)"):
        TensorFolder(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "Git LFS pointer" in refusal(tmp_path)


def test_a_missing_shard_is_named_with_a_tensor_that_it_holds(tmp_path: Path) -> None:
    save_tiny(tmp_path / "one", "llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = sorted(set(index.values()))[1]
    (tmp_path / shard).unlink()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / shard}: shard is missing")
    assert any(repr(name) in message for name, file in index.items() if file == shard)


def test_an_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    assert "'../secret.safetensors', must be NAME.safetensors in the same folder" in refusal(tmp_path)


@pytest.mark.parametrize(("name", "said"), [("pytorch_model.bin", "not a file of torch.save"), ("model.pt", "no *.s")])
def test_a_folder_of_other_files_is_refused(name: str, said: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert said in refusal(tmp_path)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edited(tmp_path, **{"model.layers.1.mlp.up_proj.weight": None})
    assert "tensor 'model.layers.1.mlp.up_proj.weight' is missing (expected with shape [101, 72])" in refusal(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes_on_every_rank_count(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edited(tmp_path, **{"model.layers.0.self_attn.k_proj.weight": torch.zeros(25, 72)})
    for size in (1, 2):
        message = refusal(tmp_path, size)
        assert "model.safetensors: tensor 'model.layers.0.self_attn.k_proj.weight'" in message
        assert "has shape [25, 72], expected [24, 72]" in message


def test_a_bias_that_the_config_does_not_speak_of_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mistral")
    edited(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(120)})
    assert "'model.layers.0.self_attn.q_proj.bias' is not part of the model" in refusal(tmp_path)


def test_left_over_rotary_tables_and_a_tied_head_are_no_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    head = torch.zeros(97, 96)
    edited(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": head})
    config = ModelConfig(path=str(tmp_path), name="tiny")
    model = load_model(config, ThreadWorld(1).collectives[0], op_set("reference"), 8, 1)
    assert (model.vocab_widths, model.spec.tie_word_embeddings) == ((97,), True)


def test_quantised_tensors_are_recognised_without_a_word_in_the_config(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edited(tmp_path, **{"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, dtype=torch.int32)})
    message = refusal(tmp_path)
    assert "quantised checkpoint, and there is no quantization_config in its config.json" in message


def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    weight = torch.zeros(131, 72, dtype=torch.float8_e4m3fn)
    edited(tmp_path, **{"model.embed_tokens.weight": weight})
    assert "'model.embed_tokens.weight' has dtype F8_E4M3, which is not supported (supported: F32," in refusal(tmp_path)


def as_torch_files(folder: Path, into: Path, shards: int = 1) -> Path:
    """The same model, its weights written by torch.save."""
    into.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (into / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    names = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, into / (name if shards > 1 else "pytorch_model.bin"))
    if shards > 1:
        index = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (into / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", [1, 3])
def test_torch_files_hold_what_safetensors_hold(dtype: torch.dtype, shards: int, tmp_path: Path) -> None:
    save_tiny(tmp_path / "safe", "llama", dtype=dtype)
    torch.save({"a": object()}, tmp_path / "safe" / "training_args.bin")
    old = as_torch_files(tmp_path / "safe", tmp_path / "old", shards)
    want, found = TensorFolder(tmp_path / "safe"), TensorFolder(old)
    assert set(found.names()) == set(want.names())
    for name in want.names():
        assert torch.equal(found.view(name), want.view(name))
        assert found.dtype(name) == want.dtype(name)


def test_tensors_of_one_storage_are_read_apart(tmp_path: Path) -> None:
    both = torch.arange(12, dtype=torch.float32)
    tied = both[4:8].view(2, 2)
    torch.save({"a": tied, "b": torch.nn.Parameter(tied), "c": both[8:]}, tmp_path / "pytorch_model.bin")
    folder = TensorFolder(tmp_path)
    assert torch.equal(folder.view("a"), tied)
    assert torch.equal(folder.view("b"), tied)
    assert folder.view("c").tolist() == [8, 9, 10, 11]


def test_safetensors_go_before_torch_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert TensorFolder(tmp_path).view("a").tolist() == [1, 1]
