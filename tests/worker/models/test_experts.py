"""Families with experts against transformers, however ranks share the experts out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.kernels.ops import OpSet, Routing
from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import prepare
from allspan.worker.models.layout import layout
from support.threads import ThreadWorld
from support.tiny_models import load_model, logits_on_ranks, prefill, prompt, reference_logits, relative_error

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
PART = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", {"num_local_experts": 5, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3, plain weights": ("qwen3_moe", {"num_local_experts": 6, "norm_topk_prob": False}),
    "qwen2": ("qwen2_moe", {"num_experts": 6, "shared_expert_intermediate_size": 56}),
    "qwen2, sparse": ("qwen2_moe", {"num_experts": 4, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "glm4": ("glm4_moe", {"n_routed_experts": 8, "routed_scaling_factor": 2.5, "use_qk_norm": True}),
    "glm4, groups": ("glm4_moe", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "attention_bias": True}),
    "minimax": ("minimax_m2", {"num_local_experts": 8, "intermediate_size": 48, "rope_parameters": PART}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
    ),
}
IDS = prompt(40, 97)


def save(folder: Path, name: str) -> Any:
    """A random model whose routers' biases decide: they are far larger than scores differ. Sinks are as large, and
    experts' biases leave the limits of a clamped activation."""
    model_type, config = MODELS[name]
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 4.0 if key.endswith("_proj_bias") else 0.15)
            if key.endswith(("sinks", "router.bias")):
                size = 5.0 if key.endswith("sinks") else 12.0
                parameter.add_(size * (-1.0) ** torch.arange(len(parameter)))
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.copy_(torch.randperm(len(buffer)) * 2.0 - 12.0)
                buffer[::3] += torch.rand(len(buffer[::3]))
    model.eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_on_any_ranks_and_in_both_layouts(name: str, tmp_path: Path) -> None:
    expected = reference_logits(save(tmp_path, name), IDS)
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS])[0], expected) < 1e-4
    for ranks, groups in ((1, 0), (2, 0), (3, 0), (2, 2), (3, 3), (4, 2)):
        config = {"enable_expert_parallel": True, "expert_parallel_size": groups} if groups else {}
        found = logits_on_ranks(tmp_path, ranks, [IDS], backend="cpu", **config)[0]
        assert relative_error(found, expected) < 1e-4, f"{ranks} ranks, {groups} groups"


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_chooses_the_experts_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected, found = save(tmp_path, name), list[Tensor](), list[Tensor]()
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            hook = lambda _, arguments: expected.append(arguments[1].sort(1).values)  # noqa: E731
            layer.mlp.experts.register_forward_pre_hook(hook)
    reference_logits(model, IDS)

    def op_set_that_tells(backend: str) -> OpSet:
        ops: Any = op_set(backend)
        route = ops.route

        def tells(*arguments: Any) -> None:
            route(*arguments)
            found.extend(each.places.clone() for each in arguments if isinstance(each, Routing))

        ops.route = tells
        return cast(OpSet, ops)

    monkeypatch.setattr("support.tiny_models.op_set", op_set_that_tells)
    logits_on_ranks(tmp_path, 1, [IDS])
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.long(), theirs)


def test_a_prompt_in_chunks_and_among_others_gets_the_same_bits(tmp_path: Path) -> None:
    save(tmp_path, "qwen2")
    others = [prompt(19, 97), IDS, prompt(1, 97)]
    alone = logits_on_ranks(tmp_path, 1, [IDS], backend="cpu", quantization="int8")[0]
    assert torch.equal(logits_on_ranks(tmp_path, 1, [IDS], chunk=7, backend="cpu", quantization="int8")[0], alone)
    assert torch.equal(logits_on_ranks(tmp_path, 1, others, backend="cpu", quantization="int8")[1], alone)


@pytest.mark.parametrize("groups", [0, 2])
def test_every_rank_counts_the_tokens_of_all_experts_of_its_layers(groups: int, tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    config = ModelConfig(str(tmp_path), "tiny", enable_expert_parallel=bool(groups))
    world = ThreadWorld(2)

    def run(rank: int) -> tuple[ExpertLoad, ...]:
        model = load_model(config, world.collectives[rank], op_set("cpu"), 40, 40, cache=CacheConfig(page_size=16))
        assert [(load.choices, load.imbalance) for load in model.expert_loads()] == [(0, 1.0), (0, 1.0)]
        prefill(model, [IDS], 16)
        return model.expert_loads()

    told, other = world.run(run)
    assert told == other
    assert [load.layer for load in told] == [0, 2]
    for load in told:
        assert load.choices == sum(load.tokens) == 40 * 2
        assert load.hottest_share == max(load.tokens) / 80 == load.tokens[load.hottest] / 80
        busiest = max(sum(load.tokens[:3]), sum(load.tokens[3:]))
        assert load.imbalance == (busiest / 40 if groups else 1.0)


@pytest.mark.parametrize(("groups", "held"), [(0, [(5, 4), (5, 4)]), (2, [(3, 6), (2, 6)])])
def test_ranks_hold_slices_of_all_experts_or_whole_ones(
    groups: int, held: list[tuple[int, int]], tmp_path: Path
) -> None:
    """[experts, panels] of gate and up: 48 columns are 3 panels each, half of them 2."""
    save(tmp_path, "qwen3")
    config = ModelConfig(str(tmp_path), "tiny", enable_expert_parallel=bool(groups))
    holdings = [prepare(config, CacheConfig(), rank, 2).holding for rank in range(2)]
    tensors = [
        {name: each.shape for piece in layout(holding.spec) for name, each in holding.tensors(piece).items()}
        for holding in holdings
    ]
    assert [shapes["layers.0.expert_gate_up.weight"][:2] for shapes in tensors] == held
    assert [shapes["layers.0.router.weight"] for shapes in tensors] == [(5, 64)] * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"enable_expert_parallel": True, "expert_parallel_size": 3}, "must divide the 2 ranks"),
        ({"expert_parallel_size": 2}, "use both"),
    ],
)
def test_groups_that_cannot_be_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=says):
        prepare(replace(ModelConfig(str(tmp_path), "tiny"), **change), CacheConfig(), 0, 2)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "glm4", "minimax"])
def test_experts_in_one_tensor_a_layer_are_those_of_their_own_tensors(name: str, tmp_path: Path) -> None:
    """As transformers has them in memory, with a layer that drafts behind the last one."""
    model = save(tmp_path, name)
    (expected,) = logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")
    fused = {key: value.contiguous() for key, value in model.state_dict().items()}
    if name == "glm4":
        fused["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")[0], expected)
    groups = {"enable_expert_parallel": True}
    assert relative_error(logits_on_ranks(tmp_path, 3, [IDS], backend="cpu")[0], expected) < 1e-5
    assert relative_error(logits_on_ranks(tmp_path, 2, [IDS], backend="cpu", **groups)[0], expected) < 1e-5


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("experts.down_proj", None, "experts.down_proj' is missing"),
        ("experts.gate_up_proj", (5, 95, 64), r"has shape \[5, 95, 64\], expected \[5, 96, 64\]"),
        ("experts.1.up_proj.weight", (48, 64), "experts.1.up_proj.weight' is not part of the model"),
    ],
)
def test_wrong_experts_in_one_tensor_are_refused_by_name(
    key: str, value: tuple[int, ...] | None, says: str, tmp_path: Path
) -> None:
    fused = {name: each.contiguous() for name, each in save(tmp_path, "qwen3").state_dict().items()}
    name = f"model.layers.2.mlp.{key}"
    if value is None:
        del fused[name]
    else:
        fused[name] = torch.zeros(value)
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        logits_on_ranks(tmp_path, 1, [IDS])


def test_a_released_config_tells_the_rotary_dimension_and_another_norm_is_refused(tmp_path: Path) -> None:
    expected = reference_logits(save(tmp_path, "minimax"), IDS)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config |= {"rotary_dim": 8, "rope_theta": 5000000, "scoring_func": "sigmoid", "use_routing_bias": True}
    path.write_text(json.dumps(config))
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS])[0], expected) < 1e-4
    path.write_text(json.dumps(config | {"qk_norm_type": "per_head"}))
    with pytest.raises(CheckpointError, match=r"qk_norm_type 'per_head' is not supported \(supported: 'per_layer'\)"):
        prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), 0, 1)


def test_random_weights_of_experts_are_the_same_on_any_ranks(tmp_path: Path) -> None:
    save(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").unlink()
    one, two = (logits_on_ranks(tmp_path, ranks, [IDS], load_format="dummy")[0] for ranks in (1, 2))
    assert relative_error(two, one) < 1e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", r"3.up_proj.weight' is missing \(expected with shape \[48, 64\]\)"),
        ("misshapen", r"3.up_proj.weight' has shape \[47, 64\], expected \[48, 64\]"),
        ("one too many", r"5.up_proj.weight' is not part of the model"),
        ("doubled", r"00002.safetensors: tensor .*3.up_proj.weight' is in model-00001-of-00002.safetensors, too"),
    ],
)
def test_a_checkpoint_with_a_wrong_expert_is_refused_by_its_name(change: str, says: str, tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.2.mlp.experts.3.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "misshapen":
        tensors[name] = tensors[name][:-1].clone()
    elif change == "one too many":
        tensors[name.replace(".3.", ".5.")] = torch.zeros(48, 64)
    else:
        save_file({name: tensors[name]}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
        (tmp_path / "model.safetensors").unlink()
    file = "model-00001-of-00002.safetensors" if change == "doubled" else "model.safetensors"
    save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        logits_on_ranks(tmp_path, 1, [IDS])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_local_experts": 100000}, "num_experts"),
        ({"num_local_experts": 0}, "num_experts"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_configs_that_name_no_mixture_are_refused(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(CheckpointError, match=says):
        prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), 0, 1)
