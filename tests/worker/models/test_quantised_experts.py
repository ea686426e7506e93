"""Quantised checkpoints of families with experts: logits are those of transformers with the weights that the tensors
stand for, however ranks share the experts out."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.kernels.reference.packed_linear import unpack
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load import loader
from allspan.worker.load.loader import note_decoded, open_checkpoint, prepare
from allspan.worker.models.layout import layout
from allspan.worker.models.pieces import Linear
from allspan.worker.quant.packed import PackedMethod
from support.quantised_checkpoints import (
    FORMS,
    FP8,
    FP8_BLOCKS,
    Form,
    Whole,
    fp8_of_all,
    fp8_of_blocks,
    fp8_of_outputs,
    gptq,
    gptq_config,
    quantise_folder,
)
from support.tiny_models import logits_on_ranks, prompt, reference_logits

SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "intermediate_size": 160,
    "moe_intermediate_size": 288,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
"""Of 288 columns two or four ranks have parts that begin within a group of 64 or 128."""
QWEN2 = {"num_experts": 5, "shared_expert_intermediate_size": 96}
PLAIN = (".gate.", "shared_expert_gate")
LAYOUTS = ((1, 0), (2, 0), (4, 0), (2, 2), (4, 2), (4, 4))
"""Ranks, and groups of them that have experts of their own (0: none)."""
ORDERED = {"gptq-ordered", "compressed-int4-ordered"}
"""Forms with an order of inputs for each expert."""
IDS = prompt(23, 97)


def split(groups: int) -> dict[str, Any]:
    return {"enable_expert_parallel": True, "expert_parallel_size": groups} if groups else {}


@dataclass(frozen=True)
class Saved:
    path: Path
    form: str
    expected: Tensor
    """transformers' logits of IDS."""
    decoded: dict[str, Tensor]

    def error(self, ranks: int, groups: int, **config: Any) -> float:
        """How far a token's logits are off at most, over the largest; where inputs are rounded, two of the tokens may
        go to another expert."""
        (found,) = logits_on_ranks(self.path, ranks, [IDS], **split(groups), **config)
        errors = (found - self.expected).abs().amax(1) / self.expected.abs().max()
        return float(errors.sort().values[-3 if self.form == "compressed-int8" else -1])


def save_plain(folder: Path, model_type: str, **config: Any) -> dict[str, Tensor]:
    """A random model, and its tensors."""
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.1)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def decoded_logits(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    """transformers' logits of the folder's model with other weights."""
    config, plain = folder / "config.json", folder / "plain"
    plain.mkdir()
    values = json.loads(config.read_text()) | {"quantization_config": None}
    (plain / "config.json").write_text(json.dumps(values))
    save_file({name: each.float() for name, each in tensors.items()}, plain / "model.safetensors", {"format": "pt"})
    return reference_logits(AutoModelForCausalLM.from_pretrained(plain).eval(), IDS)


def save(
    folder: Path, form: str | tuple[Form, Any], kept: tuple[str, ...] = (), model_type: str = "qwen3_moe", **config: Any
) -> Saved:
    """A random model in a form, or one of FORMS; what has `kept` in its name stays plain."""
    plain = save_plain(folder, model_type, **config or {"num_experts": 5})
    make, described = FORMS[form] if isinstance(form, str) else form
    decoded = quantise_folder(folder, make, described, PLAIN + kept)
    return Saved(folder, str(form), decoded_logits(folder, plain | decoded), decoded)


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
    config = ModelConfig(str(saved.path), "tiny", dtype="bfloat16", **split(groups))
    checked = 0
    for rank in range(ranks):
        prepared = prepare(config, CacheConfig(), rank, ranks)
        holding = prepared.holding
        tensors = holding.read(open_checkpoint(prepared.source, "auto"), "cpu")
        assert isinstance(holding.method, PackedMethod)
        for piece in layout(holding.spec):
            if not isinstance(piece, Linear) or piece.experts is None:
                continue
            (packed,) = holding.method.packed(holding.shape_of(piece))
            is_cut = groups != ranks and piece.name.endswith("down")
            is_decoded = saved.form == "gptq-irregular" or (saved.form in ORDERED and is_cut)
            assert packed.spec.kind.is_quantised != is_decoded
            for place, expert in enumerate(holding.shard.units(piece.experts)):
                values = unpack(tensors[f"{piece.name}.{packed.weight}"][place], packed.spec, torch.float64)
                if packed.is_ordered:
                    values = values[:, tensors[f"{piece.name}.{packed.order}"][place].argsort()]
                for part, held in zip(piece.parts, torch.split(values, list(packed.spec.parts)), strict=True):
                    layer, role = part.name.removeprefix("layers.").split(".expert_")
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"
                    rows, inputs = (holding.shard.part(axis) for axis in (part.rows, piece.inputs))
                    expected = saved.decoded[name][rows.start : rows.stop, inputs.start : inputs.stop]
                    torch.testing.assert_close(held, expected, rtol=4e-3, atol=5e-4, msg=lambda m, n=name: f"{n}: {m}")
                    checked += 1
    assert checked == 2 * 3 * 5 * (ranks if not groups else 1)


def test_experts_that_a_gpu_cannot_load_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 204 columns each of four ranks has 51."""
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    save_plain(tmp_path, "qwen3_moe", num_experts=5, moe_intermediate_size=204)
    config = ModelConfig(str(tmp_path), "tiny", dtype="bfloat16", quantization="uint4")
    with pytest.raises(ConfigError, match=r"layers.0.expert_gate_up.weight: on rank 0 of 4 an expert has 102 rows of"):
        prepare(config, CacheConfig(), 0, 4)
    prepare(replace(config, **split(4)), CacheConfig(), 0, 4)


@pytest.mark.parametrize(
    "kept",
    [("self_attn",), ("experts",), ("up_proj",), ("layers.1.mlp.experts.3.down_proj", "layers.0.mlp.experts")],
    ids=["experts alone", "attention alone", "gate beside plain up", "one of the experts plain"],
)
@pytest.mark.parametrize("form", ["fp8-blocks", "awq"])
def test_formats_may_mix_in_a_layer(form: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    saved = save(tmp_path, form, kept)
    for ranks, groups in LAYOUTS[1:4]:
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
    for ranks, groups in LAYOUTS[1:4]:
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


Stack = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""One expert's matrix → its codes and scales, and what they stand for."""


def of_form(form: Any, scale: str) -> Stack:
    def stack(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stored, decoded = form(matrix)
        return stored["weight"], stored[scale], decoded

    return stack


def exponents_of_blocks(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = fp8_of_blocks(matrix)[0]["weight_scale_inv"].log2().ceil().exp2()
    grown = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: matrix.shape[0], : matrix.shape[1]]
    codes = (matrix / grown).to(torch.float8_e4m3fn)
    return codes, scales.to(torch.float8_e8m0fnu), codes.double() * grown


def halves(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A scale for gate and one for up."""
    parts = [fp8_of_all(half) for half in matrix.chunk(2)]
    scales = torch.stack([stored["weight_scale"] for stored, _ in parts]).unsqueeze(1)
    return torch.cat([stored["weight"] for stored, _ in parts]), scales, torch.cat([decoded for _, decoded in parts])


STACKS: dict[str, tuple[Stack, str, dict[str, Any]]] = {
    "tensors": (of_form(fp8_of_all, "weight_scale"), "_scale", FP8),
    "halves": (halves, "_scale_inv", FP8),
    "outputs": (of_form(fp8_of_outputs, "weight_scale"), "_scale", FP8),
    "blocks": (of_form(fp8_of_blocks, "weight_scale_inv"), "_scale_inv", FP8_BLOCKS),
    "exponents": (exponents_of_blocks, "_scale_inv", FP8_BLOCKS),
}


def save_stacked(folder: Path, name: str, suffix: str = "") -> Saved:
    """Experts in one tensor a layer, gate above up."""
    plain = save_plain(folder, "qwen3_moe", num_experts=5)
    stack, mark, config = STACKS[name]
    tensors = {key: each for key, each in plain.items() if ".experts." not in key}
    decoded: dict[str, Tensor] = {}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        for roles in (("gate", "up"), ("down",)):
            codes, scales = [], []
            for expert in range(5):
                names = [f"{stem}{expert}.{role}_proj.weight" for role in roles]
                code, scale, values = stack(torch.cat([plain[each] for each in names]))
                codes.append(code)
                scales.append(scale)
                decoded |= dict(zip(names, torch.split(values, [len(plain[each]) for each in names]), strict=True))
            fused = f"{stem}{'_'.join(roles)}_proj{suffix}"
            tensors |= {fused: torch.stack(codes), fused + mark: torch.stack(scales)}
            tensors[f"{stem}{'_'.join(roles)}_proj_activation_scale"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return Saved(folder, "fp8", decoded_logits(folder, plain | decoded), decoded)


@pytest.mark.parametrize(("name", "suffix"), [*((name, "") for name in STACKS), ("blocks", ".weight")])
def test_fp8_of_all_experts_may_be_one_tensor(
    name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_stacked(tmp_path, name, suffix)
    for ranks, groups in LAYOUTS[1:4]:
        assert saved.error(ranks, groups, dtype="float32", backend="cpu") < 1e-4
    test_rows_of_a_gpu_hold_what_the_tensors_of_each_expert_stand_for(4, 0, saved, monkeypatch)


UP = "model.layers.1.mlp.experts.3.up_proj."


@pytest.mark.parametrize(
    ("form", "changes", "says"),
    [
        ("fp8-blocks", {"weight_scale_inv": None}, "3.up_proj.weight' has dtype F8_E4M3, and there are no scales for"),
        ("fp8-blocks", {"weight": None}, "3.up_proj' .*: it has no 'weight'"),
        ("fp8-blocks", {"weight": None, "weight_scale_inv": None}, "3.up_proj.weight' is missing"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(2, 2)}, "3.up_proj' .*neither one for all"),
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


def opened(folder: Path) -> tuple[Any, ...]:
    config = ModelConfig(str(folder), "tiny")
    prepared = prepare(config, CacheConfig(), 0, 1)
    return prepared.source, prepared.holding, config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"down_proj_scale_inv": None}, "down_proj' has dtype F8_E4M3, and there are no scales"),
        ({"down_proj_scale_inv": torch.ones(5, 3, 3)}, "down_proj' .*neither one an expert"),
        ({"down_proj": torch.zeros(4, 160, 288).to(torch.float8_e4m3fn)}, "down_proj' .*neither one an expert"),
        ({"4.down_proj.weight": torch.zeros(160, 288)}, "4.down_proj.weight' is not part of the model"),
    ],
)
def test_wrong_experts_in_one_tensor_are_refused_by_name(
    changes: dict[str, Tensor | None], says: str, tmp_path: Path
) -> None:
    save_stacked(tmp_path, "blocks")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(f"model.layers.1.mlp.experts.{name}", None)
        if value is not None:
            tensors[f"model.layers.1.mlp.experts.{name}"] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        loader.open_weights(*opened(tmp_path))
