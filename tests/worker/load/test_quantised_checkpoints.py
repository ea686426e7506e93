"""Checkpoints that are quantised already: weights are what their tensors stand for, and logits those of transformers'
model with such weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.reference.packed_linear import unpack
from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig, ServiceConfig, WorkerConfig
from allspan.worker.load import loader
from allspan.worker.load.loader import note_decoded, open_checkpoint, prepare
from allspan.worker.models.layout import layout
from allspan.worker.models.pieces import Vector
from allspan.worker.quant.packed import PackedMethod
from allspan.worker.tools.convert import convert
from support.quantised_checkpoints import (
    AWQ,
    FORMS,
    FP8_BLOCKS,
    Whole,
    awq,
    fp8_of_all,
    fp8_of_blocks,
    gptq,
    gptq_config,
    quantise_folder,
)
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error, save_tiny

SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 5, "head_dim": 32}
PROMPT = prompt(21, 97)
HELD = {
    "fp8": "fp8",
    "fp8-blocks": "fp8_block",
    "compressed-fp8": "fp8",
    "compressed-int8": "channel8",
    "compressed-int8-alone": "group8",
    "compressed-int4": "group4",
    "compressed-int4-ordered": "group4",
    "awq": "group4",
    "gptq": "group4",
    "gptq-channel": "channel4",
    "gptq-8-bits": "group8",
    "gptq-v2": "group4",
    "gptq-ordered": "group4",
    "gptq-irregular": "bf16",
}
"""By the form, the format in rows, on one rank."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if the device were a GPU."""
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    return monkeypatch


def save_quantised(folder: Path, name: str, kept: tuple[str, ...] = ()) -> tuple[Any, dict[str, Tensor]]:
    """transformers' model with the weights that the tensors stand for, and these."""
    model = save_tiny(folder, "llama2", **SIZES, num_key_value_heads=5)
    form, config = FORMS[name]
    decoded = quantise_folder(folder, form, config, kept)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in decoded.items():
            parameters[name].copy_(values)
    return model, decoded


def weights_of(folder: Path, rank: int, size: int) -> dict[str, tuple[str, Tensor]]:
    """Checkpoint name → the format of its packed part, and what it holds of the matrix: this rank's outputs and inputs,
    float64."""
    prepared = prepare(ModelConfig(str(folder), "tiny", dtype="bfloat16"), CacheConfig(), rank, size)
    holding = prepared.holding
    tensors = holding.read(open_checkpoint(prepared.source, "auto"), "cpu")
    method, found = holding.method, {}
    assert isinstance(method, PackedMethod)
    for piece in layout(holding.spec):
        if isinstance(piece, Vector):
            continue
        for packed in method.packed(holding.shape_of(piece)):
            values = unpack(tensors[f"{piece.name}.{packed.weight}"], packed.spec, torch.float64)
            if packed.is_ordered:
                values = values[:, tensors[f"{piece.name}.{packed.order}"].argsort()]
            parts = zip(piece.parts[packed.first_part :], torch.split(values, list(packed.spec.parts)), strict=False)
            for part, held in parts:
                found[holding.weights.foreign(f"{part.name}.weight", "hugging_face")] = packed.spec.format, held
    return found


def check_weights(found: dict[str, tuple[str, Tensor]], decoded: dict[str, Tensor], rank: int, size: int) -> None:
    """Attention heads and intermediate columns are split evenly enough for these sizes: see `SIZES`."""
    heads = (range(96), range(96, 160)) if size == 2 else (range(160),)
    columns = (range(144), range(144, 288)) if size == 2 else (range(288),)
    for name, whole in decoded.items():
        mine = columns[rank] if "mlp" in name else heads[rank]
        part = slice(mine.start, mine.stop)
        expected = whole[:, part] if "o_proj" in name or "down_proj" in name else whole[part]
        torch.testing.assert_close(found[name][1], expected, rtol=4e-3, atol=5e-4, msg=lambda m, n=name: f"{n}: {m}")


@dataclass(frozen=True)
class Saved:
    name: str
    path: Path
    expected: Tensor
    """transformers' logits of PROMPT."""
    decoded: dict[str, Tensor]

    def error(self, ranks: int, **config: Any) -> float:
        (found,) = logits_on_ranks(self.path, ranks, [PROMPT], **config)
        return relative_error(found, self.expected)


@pytest.fixture(scope="module", params=FORMS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of each form."""
    path = tmp_path_factory.mktemp(request.param)
    model, decoded = save_quantised(path, request.param)
    return Saved(request.param, path, reference_logits(model, PROMPT), decoded)


def test_decoded_logits_are_those_of_transformers_with_the_same_weights(saved: Saved) -> None:
    assert saved.error(1, quantization="none", dtype="float32") < 1e-4


def test_logits_with_panels_are_those_of_transformers_with_the_same_weights(saved: Saved) -> None:
    """But for float16 offsets of groups, and what is rounded of inputs."""
    limit = 0.1 if saved.name == "compressed-int8" else 0.01
    for backend in ("reference", op_set().name):
        assert saved.error(1, dtype="float32", backend=backend) < limit


def test_logits_with_rows_are_near_those_of_transformers(saved: Saved, rows: pytest.MonkeyPatch) -> None:
    assert saved.error(2, dtype="bfloat16") < 0.1


def test_rows_hold_what_the_tensors_stand_for(saved: Saved, rows: pytest.MonkeyPatch) -> None:
    """A rank's inputs may begin within a block."""
    for size in (1, 2):
        for rank in range(size):
            found = weights_of(saved.path, rank, size)
            check_weights(found, saved.decoded, rank, size)
            formats = {found[each][0] for each in saved.decoded}
            assert formats == {HELD[saved.name]} | ({"bf16"} if size == 2 and "ordered" in saved.name else set())
            assert found["lm_head.weight"][0] == "bf16"


def test_what_was_left_plain_stays_plain(tmp_path: Path, rows: pytest.MonkeyPatch) -> None:
    """Parts of a layer that are held differently are products of their own."""
    model, decoded = save_quantised(tmp_path, "fp8-blocks", kept=("k_proj", "layers.1.mlp.down_proj"))
    found = weights_of(tmp_path, 0, 1)
    assert {name for name, (kind, _) in found.items() if kind == "fp8_block"} == decoded.keys()
    assert len(decoded) == 14 - 3
    (logits,) = logits_on_ranks(tmp_path, 1, [PROMPT], dtype="bfloat16")
    assert relative_error(logits, reference_logits(model, PROMPT)) < 0.05


def test_formats_without_kernels_are_decoded_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantised(tmp_path, "fp8-blocks")
    prepared = prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), 0, 1)
    assert prepared.held == {"dtype": "bfloat16", "quantization": "fp8", "quantization_group": -1}
    note_decoded(str(tmp_path), prepared.holding)
    assert "tensors of type fp8/128 are decoded and held as bfloat16" in caplog.text
    assert {kind for kind, _ in weights_of(tmp_path, 0, 1).values()} == {"bf16"}


def test_inputs_out_of_order_that_ranks_share_are_decoded_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantised(tmp_path, "gptq-ordered")
    for size in (1, 2):
        assert not caplog.text
        note_decoded(str(tmp_path), prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), 0, size).holding)
    assert "tensors of type int4/64 with inputs out of order are decoded and held as bfloat16" in caplog.text


def test_a_quantised_checkpoint_can_be_quantised_otherwise(tmp_path: Path) -> None:
    model, _ = save_quantised(tmp_path, "fp8-blocks")
    (found,) = logits_on_ranks(tmp_path, 1, [PROMPT], quantization="int8", dtype="float32")
    assert relative_error(found, reference_logits(model, PROMPT)) < 0.05


def test_what_old_tools_describe_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    model, _ = save_quantised(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    described = config.pop("quantization_config")
    del described["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(described))
    (found,) = logits_on_ranks(tmp_path, 1, [PROMPT], dtype="float32")
    assert relative_error(found, reference_logits(model, PROMPT)) < 0.01


def test_a_bias_that_is_not_zero_is_refused_where_the_model_has_none(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama2", **SIZES, num_key_value_heads=5)

    def biased(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, decoded = gptq(Whole(), weight)
        return stored | {"bias": torch.ones(len(weight))}, decoded

    quantise_folder(tmp_path, biased, gptq_config(Whole()))
    with pytest.raises(CheckpointError, match=r"bias' is not part of the model"):
        weights_of(tmp_path, 0, 1)


def test_ordered_weights_are_converted(tmp_path: Path) -> None:
    model, _ = save_quantised(tmp_path / "source", "gptq-ordered")
    (tmp_path / "out").mkdir()
    config = ModelConfig(path=str(tmp_path / "source"), name="tiny", dtype="float32")
    convert(WorkerConfig(config, ServiceConfig(run_dir="/nowhere")), 2, tmp_path / "out")
    (found,) = logits_on_ranks(tmp_path / "out", 2, [PROMPT])
    assert relative_error(found, reference_logits(model, PROMPT)) < 0.01


def test_a_method_of_other_checkpoints_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama2")
    config = ModelConfig(str(tmp_path), "tiny", quantization="compressed-tensors")
    with pytest.raises(ConfigError, match=r"'compressed-tensors' is for checkpoints that are quantised so.* use none,"):
        prepare(config, CacheConfig(), 0, 1)


def test_random_weights_of_a_quantised_config_are_plain(tmp_path: Path) -> None:
    save_quantised(tmp_path, "fp8")
    (found,) = logits_on_ranks(tmp_path, 1, [PROMPT], load_format="dummy")
    assert found.isfinite().all()


COMPRESSED = {"quant_method": "compressed-tensors"}


def strange_groups(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors, decoded = gptq(Whole(4, 32), weight)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // 32
    groups[0] = -1
    return tensors | {"g_idx": groups}, decoded


@pytest.mark.parametrize(
    ("form", "config", "message"),
    [
        (lambda w: ({"weight": w}, w), FP8_BLOCKS, r"names weights quantised by 'fp8', and .* has none"),
        (lambda w: fp8_of_blocks(w, 64), FP8_BLOCKS, r"'model.layers.0.mlp.*scales are neither .* of \(128, 128\)"),
        (lambda w: ({"weight": w.to(torch.uint8), "weight_scale": w[0, 0]}, w), FP8_BLOCKS, r"weights are torch.uint8"),
        (lambda w: ({"qweight": w.int(), "scales": w.clone()}, w), AWQ, r"it has no 'qzeros'"),
        (partial(awq, Whole(4, 32)), AWQ | {"version": "gemv"}, r"AWQ with 4 bits in version 'gemv' is not supported"),
        (partial(gptq, Whole(2, 32)), gptq_config(Whole(2, 32)), r"codes of 2 bits are not supported \(4, 8\)"),
        (partial(gptq, Whole(4, 32)), gptq_config(Whole(4, 64)), r"288 inputs do not have 9 groups of \[64\]"),
        (strange_groups, gptq_config(Whole(4, 32)), r"mlp.*inputs are in groups -1 to 8, must be in 0 to 8"),
        (
            partial(gptq, Whole(4, 32)),
            gptq_config(Whole(4, 32)) | {"bits": 0},
            r"bits of the .* is '0', must be a number",
        ),
        (partial(gptq, Whole(4, 32)), gptq_config(Whole(4, 32)) | {"bits": None}, r"bits of the .* is missing: add"),
        (
            partial(gptq, Whole(4, 32)),
            gptq_config(Whole(4, 32)) | {"group_size": 0},
            r"group_size of the .* is '0', must",
        ),
        (partial(awq, Whole(4, 32)), AWQ | {"bits": "4"}, r"bits of the quantization_config is '4', must be a number"),
        (fp8_of_all, FP8_BLOCKS | {"weight_block_size": 128}, r"weight_block_size of the .* is '128', must be the"),
        (fp8_of_all, COMPRESSED | {"config_groups": []}, r"config_groups of the .* is '\[\]', must be an object"),
        (fp8_of_all, COMPRESSED | {"config_groups": {"a": [1]}}, r"config_groups.a of the .* is '\[1\]', must be"),
        (
            fp8_of_all,
            COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 0}}}},
            r"json: config_groups.a.weights.num_bits of the .* is '0', must be a number of bits from 1 on: take",
        ),
        (fp8_of_all, {"quant_method": "bitsandbytes"}, r"quantised checkpoint \(bitsandbytes\) is not supported .*fp8"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(form: Any, config: Any, message: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama2", **SIZES, num_key_value_heads=5)
    quantise_folder(tmp_path, form, config)
    with pytest.raises(CheckpointError, match=message) as caught:
        prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), 0, 1)
    assert "\n" not in caught.value.message
