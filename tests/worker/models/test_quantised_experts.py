"""Quantised checkpoints of families with experts: logits are those of transformers with the weights that the tensors
stand for, however ranks share the experts out."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig, ServiceConfig, WorkerConfig
from allspan.worker.load import loader
from allspan.worker.load.loader import note_decoded, prepare
from allspan.worker.models.layout import layout
from allspan.worker.models.pieces import Linear
from allspan.worker.quant.packed import PackedMethod
from allspan.worker.tools.convert import convert
from support.quantised_checkpoints import (
    FORMS,
    Whole,
    gptq,
    gptq_config,
    quantise_folder,
)
from support.quantised_experts import (
    FEW,
    LAYOUTS,
    PLAIN,
    QWEN2,
    Saved,
    check_rows,
    decoded_logits,
    opened,
    save,
    save_plain,
    split,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices are small: torch's threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Makes a checkpoint of a form, once."""
    return functools.cache(lambda form: save(tmp_path_factory.mktemp(form), form))


@pytest.fixture(params=FORMS)
def saved(request: pytest.FixtureRequest, checkpoint: Callable[[str], Saved]) -> Saved:
    """A checkpoint of each form."""
    return checkpoint(request.param)


def test_logits_are_those_of_the_decoded_weights_on_any_ranks(saved: Saved) -> None:
    assert saved.error(1, 0, quantization="none", dtype="float32") < 1e-4
    for ranks, groups in LAYOUTS:
        assert saved.error(ranks, groups, dtype="float32", backend="cpu") < (
            0.1 if saved.form == "compressed-int8" else 0.01
        ), f"{ranks} ranks, {groups} groups"


@pytest.mark.parametrize(("ranks", "groups"), [(4, 0), (2, 2)])
def test_rows_of_a_gpu_hold_what_the_tensors_of_each_expert_stand_for(
    ranks: int, groups: int, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    check_rows(saved, ranks, groups)


def test_experts_that_a_gpu_cannot_load_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 204 columns each of four ranks has 51."""
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    save_plain(tmp_path, "qwen3_moe", num_experts=5, moe_intermediate_size=204)
    config = ModelConfig(str(tmp_path), "tiny", dtype="bfloat16", quantization="uint4")
    with pytest.raises(ConfigError, match=r"layers.0.expert_gate_up.weight: on rank 0 of 4 an expert has 102 rows of"):
        prepare(config, CacheConfig(), 0, 4)
    prepare(replace(config, **split(4)), CacheConfig(), 0, 4)
    path = tmp_path / "config.json"
    key = "num_local_experts" if "num_local_experts" in path.read_text() else "num_experts"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 520}))
    with pytest.raises(ConfigError, match="layer 0 has 520 experts, must be at most 512 on GPUs"):
        prepare(config, CacheConfig(), 0, 1)


@pytest.mark.parametrize(
    "kept",
    [("self_attn",), ("experts",), ("up_proj",), ("layers.1.mlp.experts.3.down_proj", "layers.0.mlp.experts")],
    ids=["experts alone", "attention alone", "gate beside plain up", "one of the experts plain"],
)
@pytest.mark.parametrize("form", ["fp8-blocks", "awq"])
def test_formats_may_mix_in_a_layer(form: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    saved = save(tmp_path, form, kept)
    for ranks, groups in FEW:
        assert saved.error(ranks, groups, dtype="float32", backend="cpu") < 0.01


@pytest.mark.parametrize(
    ("model_type", "form", "kept", "config"),
    [
        ("qwen2_moe", "compressed-int8-alone", ("shared_expert.",), QWEN2),
        ("qwen2_moe", "gptq", (), QWEN2),
        ("mixtral", "gptq-8-bits", (), {"num_local_experts": 4}),
        ("minimax_m2", "fp8-blocks", (), {"num_local_experts": 4, "intermediate_size": 288}),
        ("glm4_moe", "fp8-blocks", ("shared_experts",), {"n_routed_experts": 4, "first_k_dense_replace": 1}),
    ],
)
def test_other_families_have_quantised_experts(
    model_type: str, form: str, kept: tuple[str, ...], config: dict[str, Any], tmp_path: Path
) -> None:
    saved = save(tmp_path, form, kept, model_type, **config)
    for ranks, groups in FEW:
        assert saved.error(ranks, groups, dtype="float32", backend="cpu") < 0.01


def test_experts_of_several_types_are_decoded_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save(tmp_path, "awq", ("layers.1.mlp.experts.3.down_proj",))
    note_decoded("tiny", prepare(ModelConfig(str(saved.path), "tiny"), CacheConfig(), 0, 1).holding)
    assert "tensors of type int4/32 and plain are decoded and held as bfloat16" in caplog.text


def test_inputs_in_orders_of_experts_that_ranks_share_are_decoded_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save(tmp_path, "gptq-ordered", ("self_attn",))
    for config, size in (({}, 1), (split(2), 2), ({}, 2)):
        assert not caplog.text
        holding = prepare(ModelConfig(str(saved.path), "tiny", **config), CacheConfig(), 0, size).holding
        note_decoded("tiny", holding)
    assert "tensors of type int4/64 with inputs out of order are decoded and held as bfloat16" in caplog.text


@pytest.mark.parametrize("alike", [3, 1], ids=["an order an expert", "an order a matrix"])
def test_each_expert_has_its_inputs_in_an_order_of_its_own(alike: int, tmp_path: Path) -> None:
    """Of three matrices gate and up have the same order, or every matrix another one; names come by expert."""
    numbers, what = itertools.count(), Whole(4, 64, is_ordered=True)

    def form(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return gptq(replace(what, seed=next(numbers) // alike), weight)

    saved = save(tmp_path, (form, gptq_config(what)), ("self_attn",))
    for ranks, groups in LAYOUTS[:4]:
        assert saved.error(ranks, groups, dtype="float32", backend="cpu") < 0.01
    holding = prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), 0, 1).holding
    assert isinstance(holding.method, PackedMethod)
    pieces = [piece for piece in layout(holding.spec) if isinstance(piece, Linear) and piece.experts is not None]
    packed = [holding.method.packed(holding.shape_of(piece)) for piece in pieces]
    assert [len(parts) for parts in packed] == [1 if alike == 3 else 2, 1] * 2
    assert all(part.is_ordered and part.spec.format == "group4" for parts in packed for part in parts)


UP = "model.layers.1.mlp.experts.3.up_proj."


@pytest.mark.parametrize(
    ("form", "changes", "says"),
    [
        ("fp8-blocks", {"weight_scale_inv": None}, "3.up_proj.weight' has dtype F8_E4M3, and there are no scales for"),
        ("fp8-blocks", {"weight": None}, "3.up_proj' .*: it has no 'weight'"),
        ("fp8-blocks", {"weight": None, "weight_scale_inv": None}, "3.up_proj.weight' is missing"),
        (
            "fp8-blocks",
            {"weight_scale_inv": torch.ones(2, 2)},
            r"3.up_proj' .*neither one for all.*\[2, 2\], where blocks have \[3, 2\]",
        ),
        ("fp8", {"weight": torch.zeros(287, 160).to(torch.float8_e4m3fn)}, "3.up_proj.weight' has shape .287,"),
        ("fp8", {"weight_scale_inv": torch.ones(1)}, "3.up_proj' .*it has both weight_scale and weight_scale_inv"),
        ("gptq", {"weight": torch.zeros(288, 160)}, "3.up_proj' .*it has both weight and qweight: remove one of them"),
        ("gptq", {"qweight": None, "bias": None, "g_idx": None}, "3.up_proj.qzeros' .*the codes of its matrix are"),
        ("awq", {"scales": None}, "3.up_proj' .*: it has no 'scales'"),
        ("awq", {"qweight": torch.zeros(152, 36, dtype=torch.int32)}, "3.up_proj.weight' has shape .288, 152., exp"),
        ("compressed-int4", {"weight_shape": torch.tensor([288, 128])}, "3.up_proj' .*are not codes of 4 or 8 bits"),
    ],
)
def test_a_wrong_expert_is_refused_by_its_name(
    form: str, changes: dict[str, Tensor | None], says: str, tmp_path: Path, checkpoint: Callable[[str], Saved]
) -> None:
    shutil.copytree(checkpoint(form).path, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for suffix, value in changes.items():
        tensors.pop(UP + suffix, None)
        if value is not None:
            tensors[UP + suffix] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=says) as caught:
        loader.open_weights(*opened(tmp_path))
    assert "layers.1.mlp.experts.3." in caught.value.message


def test_groups_of_a_config_may_be_of_different_numbers(tmp_path: Path) -> None:
    """Attention in fp8 whose inputs have 8 bits, gate and up in integers of 8 bits alone, down in 4 bits."""
    plain, decoded = save_plain(tmp_path, "qwen3_moe", num_experts=5), {}
    forms: dict[str, tuple[str, ...]] = {
        "compressed-fp8": (*PLAIN, "experts"),
        "compressed-int8-alone": (*PLAIN, "down_proj", "self_attn"),
        "compressed-int4": (*PLAIN, "gate_proj", "up_proj", "self_attn"),
    }
    groups = {}
    for number, (name, kept) in enumerate(forms.items()):
        make, config = FORMS[name]
        decoded |= quantise_folder(tmp_path, make, config, kept)
        groups[f"group_{number}"] = config["config_groups"]["group_0"]
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    path.write_text(json.dumps(values))
    saved = Saved(tmp_path, "mixed", decoded_logits(tmp_path, plain | decoded), decoded)
    for ranks, parts in FEW:
        assert saved.error(ranks, parts, dtype="float32", backend="cpu") < 0.01


def test_converted_files_hold_the_experts_orders(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "source").mkdir()
    saved = save(tmp_path / "source", "gptq-ordered")
    config = ModelConfig(path=str(saved.path), name="tiny", dtype="float32")
    convert(WorkerConfig(config, ServiceConfig(run_dir="/nowhere")), 2, tmp_path / "out")
    assert replace(saved, path=tmp_path / "out").error(2, 0) < 0.01
