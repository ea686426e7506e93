"""GGUF files: whole models in several types, every type slice by slice, and damaged or foreign files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from allspan.protos.api.errors import CheckpointError
from allspan.worker.load.registry import find_model
from allspan.worker.quant.gguf import NATIVE
from allspan.worker.weights.gguf_file import GgufFile
from support.tiny_gguf import save_gguf
from support.tiny_models import LLAMA3_SCALING, logits_on_ranks, prompt, reference_logits, relative_error, save_tiny

DECODED = sorted(gguf.quants._type_traits, key=lambda kind: kind.value)
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_key_value_heads": 2}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_1, Type.Q8_0])
def test_llama_in_gguf_equals_its_decoded_weights(kind: Type, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", **SIZES, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)
    save_gguf(tmp_path / "model.gguf", model, kind)
    ids = prompt(40, 97)
    expected = reference_logits(model, ids)
    for num_ranks in (1, 2, 3):
        actual = logits_on_ranks(tmp_path / "model.gguf", num_ranks, [ids], dtype="float32", quantization="none")[0]
        assert relative_error(actual, expected) < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwen_in_gguf_equals_its_decoded_weights(name: str, tmp_path: Path) -> None:
    head_dim: dict[str, Any] = {"head_dim": 24} if name == "qwen3" else {}
    model = save_tiny(tmp_path, name, **SIZES, **head_dim, tie_word_embeddings=False)
    kind = Type.Q8_0 if name == "qwen2" else Type.F16
    save_gguf(tmp_path / "model.gguf", model, kind)
    ids = prompt(40, 97)
    expected = reference_logits(model, ids)
    for num_ranks in (1, 2, 4):
        actual = logits_on_ranks(tmp_path / "model.gguf", num_ranks, [ids], dtype="float32", quantization="none")[0]
        assert relative_error(actual, expected) < 1e-4


MIXED = {"attn_v": Type.Q8_0, "ffn_up": Type.Q5_1, "ffn_down": Type.Q5_0, "token_embd": Type.Q8_0}


@pytest.mark.parametrize("mixed", [{}, MIXED])
@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q8_0])
def test_native_blocks_give_nearly_the_decoded_weights_logits(
    kind: Type, mixed: dict[str, Type], tmp_path: Path
) -> None:
    """Inputs of 8 bits move the logits by up to 4 % of the largest here; a row in the wrong place moves them by all.
    And rows of q and k are reordered, and a layer's parts may be of several types."""
    model = save_tiny(tmp_path, "llama", **SIZES, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)
    save_gguf(tmp_path / "model.gguf", model, kind, kinds=mixed)
    ids = prompt(40, 97)
    expected = reference_logits(model, ids)
    for num_ranks in (1, 2, 3, 4):  # ranks whose inputs begin within a block, or that have no row for any id
        actual = logits_on_ranks(tmp_path / "model.gguf", num_ranks, [ids], dtype="float32")[0]
        assert 1e-4 < relative_error(actual, expected) < 0.06


KEPT = sorted(set(NATIVE) - {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q5_K"})
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("kind", KEPT)
def test_every_kept_type_on_ranks_that_split_its_blocks(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`o` and `down` are split within blocks of 256, which must change nothing but the sums' order and, within 32
    inputs, their rounding; q and k are reordered, k and up are of another type, and the embedding is the head, too."""
    other = KEPT[KEPT.index(kind) - 1]
    model = save_tiny(tmp_path, "llama", **WIDE, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)
    save_gguf(tmp_path / "model.gguf", model, Type[kind], kinds={"attn_k": Type[other], "ffn_up": Type[other]})
    ids = prompt(24, 97)
    expected = reference_logits(model, ids)
    found = [logits_on_ranks(tmp_path / "model.gguf", ranks, [ids], dtype="float32")[0] for ranks in (1, 2, 3)]
    for actual in found:
        assert (actual - expected).std() / expected.std() < 0.06
    assert relative_error(found[1], found[0]) < 1e-3  # halves of 256 inputs and of 512
    assert "are decoded" not in caplog.text


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_random_weights_in_the_types_of_a_file(kind: str, tmp_path: Path) -> None:
    """The same model on any number of ranks, as far as inputs of 8 bits let it be."""
    model = save_tiny(tmp_path, "llama", **SIZES, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)
    save_gguf(tmp_path / "model.gguf", model, Type[kind])
    ids = prompt(40, 97)
    found = [
        logits_on_ranks(tmp_path / "model.gguf", num_ranks, [ids], dtype="float32", load_format="dummy")[0]
        for num_ranks in (1, 2)
    ]
    assert found[0].std() > 0.01
    assert relative_error(found[1], found[0]) < 0.06


def test_types_that_are_not_computed_with_are_decoded_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny(tmp_path, "llama", **SIZES, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)
    save_gguf(tmp_path / "model.gguf", model, Type.Q8_0, kinds={"ffn_gate": Type.F16})
    ids = prompt(40, 97)
    actual = logits_on_ranks(tmp_path / "model.gguf", 1, [ids])[0]
    assert relative_error(actual, reference_logits(model, ids)) < 0.06
    assert "tensors of type F16 are decoded and held as bfloat16" in caplog.text


def test_llama3_scaling_comes_as_a_tensor_of_divisors(tmp_path: Path) -> None:
    sizes = SIZES | {"head_dim": 16}
    model = save_tiny(tmp_path, "llama", **sizes)
    plain = {"rope_type": "default", "rope_theta": LLAMA3_SCALING["rope_theta"]}
    bare = type(model.config)(**(model.config.to_dict() | {"rope_parameters": plain}))
    divisors = LlamaRotaryEmbedding(bare).inv_freq / LlamaRotaryEmbedding(model.config).inv_freq
    model.extra_tensors = {"rope_freqs.weight": divisors.numpy()}
    save_gguf(tmp_path / "model.gguf", model, Type.F32)
    ids = prompt(120, 97)
    actual = logits_on_ranks(tmp_path / "model.gguf", 2, [ids])[0]
    assert relative_error(actual, reference_logits(model, ids)) < 1e-4


def test_the_header_says_what_the_config_said(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen3", **SIZES, rms_norm_eps=1e-5)
    save_gguf(tmp_path / "model.gguf", model, Type.BF16)
    read, original = (find_model(str(path)).spec for path in (tmp_path / "model.gguf", tmp_path))
    assert read.norm.eps == 1e-5
    assert read.layers == original.layers
    assert read.dtype == "bfloat16"
    assert read.tie_word_embeddings
    assert read.eos_token_ids == (2, 5)


def random_blocks(kind: Type, rows: int, columns: int) -> np.ndarray:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(kind.value)
    raw = generator.integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    if kind is Type.MXFP4:
        raw[:, ::block_bytes] %= 255  # byte 255 is a NaN for a scale, which readers refuse
    return raw


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
def test_a_slice_is_the_cut_of_the_whole_in_every_type(kind: Type, tmp_path: Path) -> None:
    raw = random_blocks(kind, 12, 1024)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "one.gguf")
    assert file.shape("blk.0.ffn_down.weight") == (12, 1024)
    with np.errstate(all="ignore"):
        whole = torch.from_numpy(np.array(gguf.dequantize(raw, kind), dtype=np.float32))
        for rows, columns in (
            (range(12), range(1024)),
            (range(5, 9), range(1024)),
            (range(12), range(300, 777)),
            (range(12), range(1024, 1024)),
        ):
            out = torch.empty(len(rows), len(columns))
            file.read("blk.0.ffn_down.weight", [rows, columns], out)
            expected = whole[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(out.view(torch.int32), expected.contiguous().view(torch.int32))


def tiny_file(folder: Path, metadata: dict[str, Any] | None = None) -> Path:
    model = save_tiny(folder, "llama", **SIZES, rope_parameters=PLAIN_ROPE, attention_bias=False)
    save_gguf(folder / "model.gguf", model, Type.Q8_0, metadata)
    return folder / "model.gguf"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    (tmp_path / "config.json").unlink()
    assert find_model(str(tmp_path)).spec == find_model(str(path)).spec
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="2 GGUF files: name one"):
        find_model(str(tmp_path))


def test_a_truncated_file_names_tensor_and_sizes(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(
        CheckpointError, match=rf"model.gguf: truncated: tensor '.*' ends at byte \d+, .* has {len(data) // 2} bytes"
    ):
        find_model(str(path))


@pytest.mark.parametrize("length", [0, 3, 20, 500])
def test_a_file_cut_within_its_header_is_refused_in_one_line(length: int, tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        find_model(str(path))
    assert "\n" not in str(caught.value)


def test_another_file_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        find_model(str(path))


def test_a_random_flip_in_the_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    data = bytearray(path.read_bytes())
    generator = np.random.default_rng(1)
    refused = 0
    for place in generator.integers(4, 900, 200):
        damaged = bytearray(data)
        damaged[place] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        try:
            find_model(str(path))
        except CheckpointError as error:
            refused += str(path) in str(error)
    assert refused > 20  # many flips change a name or a value that nothing reads


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_group_scale": 0.5}, "llama.expert_group_scale = 0.5 is not supported"),
        ({"llama.rope.dimension_count": 8}, r"llama.rope.dimension_count = 8 is not supported \(head size 16\)"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
    ],
)
def test_metadata_beyond_the_dense_decoder_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_model(str(tiny_file(tmp_path, metadata)))


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'mamba2' is not supported \(supported: llama, qwen2"):
        find_model(str(tmp_path / "model.gguf"))


def test_an_undecodable_type_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    data = path.read_bytes()
    needle = b"blk.0.attn_q.weight"
    at = data.index(needle) + len(needle) + 4 + 2 * 8
    assert data[at] == Type.Q8_0
    said = {Type.I8: "has type I8, which the gguf package cannot", 199: "has the unknown type 199"}
    for number, words in said.items():
        path.write_bytes(data[:at] + bytes([number]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=f"'blk.0.attn_q.weight' {words}"):
            find_model(str(path))


def test_a_missing_part_of_a_split_file_is_named(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    first = path.rename(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.gguf: part 2 of 2 is missing"):
        find_model(str(first))
