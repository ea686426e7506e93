"""Adapters that are refused: one line that names the file and what is wrong, and nothing is read into a slot."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError, PermissionDenied
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.adapters import peft_config
from allspan.worker.adapters.allowed_paths import opener_below, resolved_folder
from allspan.worker.adapters.peft_config import read_peft_config
from allspan.worker.adapters.peft_folder import PeftFolder
from allspan.worker.adapters.slots import AdapterSlots
from allspan.worker.load.loader import load_model
from support.peft_adapters import save_adapter
from support.threads import ThreadWorld
from support.tiny_models import save_tiny

HEAD = {"A": (8, 96), "B": (97, 8)}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("base")
    return save_tiny(folder, "qwen2"), folder


@pytest.fixture
def adapter(base: tuple[Any, Path], tmp_path: Path) -> Path:
    save_adapter(tmp_path / "one", base[0], 8, ("q_proj",))
    return tmp_path / "one"


def slots_of(path: Path, most: int = 16) -> AdapterSlots:
    config = ModelConfig(path=str(path), name="tiny")
    cache, world = CacheConfig(page_size=16), ThreadWorld(1)
    model = load_model(config, world.collectives[0], op_set("reference"), 8, 8, cache=cache)
    slots = AdapterSlots(model.holding, 1, most)
    slots.allocate("cpu")
    return slots


def holds_an_adapter(slots: AdapterSlots) -> bool:
    return any(tensor.any() for name, tensor in slots.tensors.items() if not name.endswith(".adapter_ends"))


def both(module: str) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{module}.lora_{side}.weight": torch.ones(8, 8) for side in "AB"}


def looked_up(module: str, tokens: int = 97, width: int = 96) -> dict[str, torch.Tensor]:
    matrices = {"A": torch.ones(8, tokens), "B": torch.ones(width, 8)}
    return {f"base_model.model.{module}.lora_embedding_{side}": matrix for side, matrix in matrices.items()}


def copied(module: str, tokens: int) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{module}.base_layer.weight": torch.ones(tokens, 96)}


def changed(adapter: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora True is not supported: adapters with a magnitude"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights 'lora_ga' is not supported"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"ensure_weight_tying": True}, "one adapter of both the embedding and the head that is tied to it"),
        ({"r": 0}, "r must be a positive integer"),
        ({"lora_alpha": "a"}, "lora_alpha must be a positive number"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern: '(' is no regular expression"),
        ({"alpha_pattern": {"(" * 5000 + ")" * 5000: 3}}, "alpha_pattern: '(((("),
        ({"rank_pattern": {"a{99999999999999999999}": 3}}, "is no regular expression: the repetition number is too"),
        ({"rank_pattern": [3]}, "rank_pattern must be an object"),
        ({"r": 4}, "has rank 8, adapter_config.json says 4"),
    ],
)
def test_a_config_that_would_not_be_computed_exactly_is_refused(
    values: dict[str, Any], words: str, adapter: Path
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(CheckpointError) as refused:
        PeftFolder(adapter)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "lora_B of 'model.layers.0.self_attn.q_proj' is missing"),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(3)}), "lora_magnitude_vector' is not supported"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 96)}), "must be [r, in] and [out, r]"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(())}), "must be [r, in] and [out, r]"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 3)}), "is for a weight of shape [96, 3]"),
        (lambda t: t[f"{Q}.lora_A.weight"].fill_(torch.nan), "numbers that are not finite"),
        (lambda t: t[f"{Q}.lora_B.weight"].fill_(3e38), "times 1.5, has numbers that are not finite in torch.float32"),
        (
            lambda t: t.update(
                {name.replace("model.layers", "language_model.model.layers"): t[name] * 2 for name in t}
            ),
            "layers.0.self_attn.q_proj' is there under another name, too: remove one of both",
        ),
        (
            lambda t: t.update(both("model.layers.9.self_attn.q_proj")),
            "'model.layers.9.self_attn.q_proj' is no layer of this model",
        ),
        (
            lambda t: t.update(both("model.embed_tokens")),
            "lora_embedding_A and lora_embedding_B are for the embedding, lora_A and lora_B for linear layers; "
            "'model.embed_tokens' has the others",
        ),
        (lambda t: t.update(looked_up("lm_head", 8, 8)), "'lm_head' has the others"),
        (
            lambda t: t.update(looked_up("model.embed_tokens", 9)),
            "'model.embed_tokens' is for a weight of shape [96, 9], the model's has [96, 97]",
        ),
        (
            lambda t: t.update(looked_up("model.embed_tokens") | copied("model.embed_tokens", 98)),
            "base_layer.weight of 'model.embed_tokens' has shape [98, 96], the model's [97, 96]: the adapter is for a",
        ),
        (lambda t: t.update(copied("lm_head", 97)), "base_layer.weight of 'lm_head' is not supported"),
        (
            lambda t: t.update({f"{Q}.lora_embedding_A": t[f"{Q}.lora_A.weight"].clone()}),
            "'model.layers.0.self_attn.q_proj' has two lora_A: remove one of both",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Any]], None], words: str, adapter: Path, base: tuple[Any, Path]
) -> None:
    changed(adapter, change)
    slots = slots_of(base[1])
    with pytest.raises(CheckpointError) as refused:
        slots.load(0, adapter)
    assert words in str(refused.value)
    assert "adapter_model.safetensors" in str(refused.value)
    assert not holds_an_adapter(slots)


def test_a_rank_above_that_of_the_slots_is_refused_with_both(adapter: Path, base: tuple[Any, Path]) -> None:
    with pytest.raises(CheckpointError, match="has rank 8, max_lora_rank is 4: raise it"):
        slots_of(base[1], 4).load(0, adapter)


def test_files_that_are_no_adapter_are_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:50], struct.pack("<Q", 10**11) + b"{", b""):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
            PeftFolder(adapter)
    file.unlink()
    (adapter / "adapter_model.bin").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is not read"):
        PeftFolder(adapter)
    os.mkfifo(file)
    with pytest.raises(CheckpointError):
        PeftFolder(adapter)


def test_a_file_that_is_cut_while_it_is_read_is_refused_and_ends_no_process(adapter: Path) -> None:
    folder, file = PeftFolder(adapter), adapter / "adapter_model.safetensors"
    os.truncate(file, 4096)  # of the header
    with pytest.raises(CheckpointError, match="was cut while it was read: let its writer finish"):
        folder.matrices(next(iter(folder.modules)), torch.float32)


@pytest.mark.parametrize("swapped", ["adapter_config.json", "adapter_model.safetensors", ""])
def test_a_link_that_is_swapped_after_the_check_is_not_read(swapped: str, adapter: Path) -> None:
    allowed = adapter.parent / "allowed"
    shutil.copytree(adapter, allowed / "one")
    path, opener = resolved_folder("one", str(allowed)), opener_below(str(allowed))
    before = len(os.listdir("/proc/self/fd"))
    os.rename(path / swapped, allowed / "kept")
    (path / swapped).symlink_to(adapter / swapped)
    with pytest.raises(PermissionDenied, match=r"was replaced by a file that lies outside of --lora-dir .*/allowed: "):
        PeftFolder(path, opener)
    assert len(os.listdir("/proc/self/fd")) == before
    (path / swapped).unlink()
    (path / swapped).symlink_to(allowed / "kept")
    assert PeftFolder(path, opener).rank == 8


def test_a_checksum_is_of_every_number_and_of_the_scale(adapter: Path, base: tuple[Any, Path]) -> None:
    slots, config = slots_of(base[1]), adapter / "adapter_config.json"
    found = [slots.stage(adapter).checksum for _ in range(2)]
    assert found[0] == found[1]
    changed(adapter, lambda tensors: tensors[f"{Q}.lora_A.weight"][7, 95].add_(1e-3))
    found.append(slots.stage(adapter).checksum)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 13}))
    found.append(slots.stage(adapter).checksum)
    assert len({*found}) == 3


def test_scales_follow_the_first_pattern_that_matches(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    values = {
        "lora_alpha": 16,
        "use_rslora": True,
        "alpha_pattern": {"q_proj": 4, ".*proj": 8},
        "rank_pattern": {"o_proj": 4},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    names = [f"model.layers.1.{name}" for name in ("q_proj", "xq_proj", "o_proj", "lm_head")]
    found = read_peft_config(adapter).factors(names)
    assert [found[name][0] for name in names] == [8, 8, 4, 8]
    assert [found[name][1] for name in names] == pytest.approx([4 / 8**0.5, 8 / 8**0.5, 8 / 4**0.5, 16 / 8**0.5])


def test_patterns_match_the_names_of_the_model_that_was_trained(adapter: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)

    file = adapter / "adapter_config.json"
    pattern = {"^model.language_model.layers.0.self_attn.q_proj": 80}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": pattern}))
    changed(adapter, rename)
    folder, tensors = PeftFolder(adapter), load_file(adapter / "adapter_model.safetensors")
    for layer, scale in ((0, 10), (1, 1.5)):
        b = tensors[f"base_model.model.model.language_model.layers.{layer}.self_attn.q_proj.lora_B.weight"]
        assert torch.equal(folder.matrices(f"model.layers.{layer}.self_attn.q_proj", torch.float32).b, scale * b)


@pytest.mark.parametrize(
    "beginning", ["model.", "model.language_model.", "language_model.model.", "language_model.", ""]
)
def test_modules_are_found_whichever_class_of_the_model_was_trained(
    beginning: str, adapter: Path, base: tuple[Any, Path]
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.layers", f"{beginning}layers")] = tensors.pop(name)

    changed(adapter, rename)
    slots = slots_of(base[1])
    slots.load(0, adapter)
    assert holds_an_adapter(slots)


def test_base_weights_beside_adapters_of_embedding_and_head_are_passed_over(
    adapter: Path, base: tuple[Any, Path]
) -> None:
    slots = slots_of(base[1])
    own = looked_up("model.embed_tokens") | {
        f"base_model.model.lm_head.lora_{side}.weight": torch.ones(shape) for side, shape in HEAD.items()
    }
    changed(adapter, lambda tensors: tensors.update(own))
    before = slots.stage(adapter).checksum
    changed(adapter, lambda tensors: tensors.update(copied("model.embed_tokens", 97) | copied("lm_head", 97)))
    assert slots.stage(adapter).checksum == before


def test_a_pattern_that_would_match_for_ever_is_refused_in_time(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "MATCH_S", 0.5)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": {"(([a-z_0-9.]+)+)+!": 4}}))
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=r"alpha_pattern take more than 0\.5 s over the names of 2 modules"):
        PeftFolder(adapter)
    assert time.monotonic() - begun < 20
