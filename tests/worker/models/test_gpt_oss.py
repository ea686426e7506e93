"""gpt-oss with experts in MXFP4: as transformers decodes them, on any ranks, and as a GGUF file has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import prepare
from allspan.worker.load.registry import find_model
from support.family_files import save_family_gguf
from support.family_rows import save_family
from support.mxfp4_model import EXPERTS, ROW, save_mxfp4
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

IDS = prompt(40, 97)
"""Longer than the window."""


def test_experts_are_those_that_transformers_decodes_on_any_ranks_and_in_both_layouts(tmp_path: Path) -> None:
    expected = reference_logits(save_mxfp4(tmp_path)[0], IDS)
    exact: dict[str, Any] = {"quantization": "none", "dtype": "float32", "backend": "cpu"}
    assert find_model(str(tmp_path)).quantised is not None
    for ranks, groups in ((1, 0), (2, 0), (4, 0), (2, 2), (4, 2), (4, 4)):
        config = {"enable_expert_parallel": True, "expert_parallel_size": groups} if groups else {}
        found = logits_on_ranks(tmp_path, ranks, [IDS], **exact, **config)[0]
        assert relative_error(found, expected) < 1e-4, f"{ranks} ranks, {groups} groups"
        blocks = logits_on_ranks(tmp_path, ranks, [IDS], dtype="float32", backend="cpu", **config)[0]
        of_token = (blocks - expected).abs().amax(
            1
        ) / expected.abs().max()  # x of 8 bits flips a token's choice at times
        assert of_token.median() < 0.05, f"{ranks} ranks, {groups} groups, in blocks"


def test_a_gguf_file_with_the_same_blocks_gives_the_same_logits(tmp_path: Path) -> None:
    model, codes = save_mxfp4(tmp_path)
    raw = {name: block for layer in range(4) for name, block in _gguf_blocks(codes, layer).items()}
    save_family_gguf(tmp_path / "model.gguf", model, ROW, raw)
    for ranks, dtype in ((1, "bfloat16"), (2, "auto")):
        folder, file = (
            logits_on_ranks(path, ranks, [IDS], backend="cpu", dtype=dtype)[0]
            for path in (tmp_path, tmp_path / "model.gguf")
        )
        assert torch.equal(folder, file)
    plain = logits_on_ranks(tmp_path / "model.gguf", 1, [IDS], quantization="none", dtype="float32")[0]
    assert relative_error(plain, reference_logits(model, IDS)) < 1e-4
    raw["blk.2.ffn_down_exps.weight"][3, 5, 17] = 255  # of the row's second block
    save_family_gguf(tmp_path / "nan.gguf", model, ROW, raw)
    for quantization in ("gguf", "none"):
        with pytest.raises(CheckpointError, match=r"blk.2.ffn_down_exps.weight' has NaN .* row \d+, block 1"):
            logits_on_ranks(tmp_path / "nan.gguf", 1, [IDS], quantization=quantization)


def _gguf_blocks(codes: dict[str, Tensor], layer: int) -> dict[str, np.ndarray]:
    """GGUF's names → uint8 [experts, out, bytes], put together element by element."""
    made: dict[str, np.ndarray] = {}
    for part in ("gate_up", "down"):
        stem = EXPERTS.format(layer, part)
        blocks, scales = codes[f"{stem}_blocks"].numpy(), codes[f"{stem}_scales"].numpy()
        elements = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:3], 32)
        packed = elements[..., :16] | elements[..., 16:] << 4
        whole = np.concatenate((scales[..., None], packed), -1).reshape(*scales.shape[:2], -1)
        names = {"ffn_gate_exps": whole[:, ::2], "ffn_up_exps": whole[:, 1::2]}
        named = names if part == "gate_up" else {"ffn_down_exps": whole}
        made |= {f"blk.{layer}.{name}.weight": np.ascontiguousarray(block) for name, block in named.items()}
    return made


def test_blocks_give_the_same_bits_alone_in_chunks_and_among_others(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    others = [prompt(19, 97), IDS, prompt(1, 97)]
    alone = logits_on_ranks(tmp_path, 2, [IDS], backend="cpu")[0]
    assert torch.equal(logits_on_ranks(tmp_path, 2, [IDS], chunk=7, backend="cpu")[0], alone)
    assert torch.equal(logits_on_ranks(tmp_path, 2, others, backend="cpu")[1], alone)


@pytest.mark.parametrize(
    ("ending", "value", "says"),
    [
        ("_scales", None, "gate_up_proj_scales' is missing"),
        ("_scales", torch.zeros(5, 192, 3, dtype=torch.uint8), r"must be \[experts, out, in / 32, 16\]"),
        ("_blocks", torch.zeros(5, 192, 2, 16), "must have dtype U8"),
        ("_blocks", torch.zeros(5, 190, 2, 16, dtype=torch.uint8), "must be"),
        ("_scales", torch.full((5, 192, 2), 255, dtype=torch.uint8), r"NaN \(byte 255\) for a scale in row 0, block 0"),
        ("_bias", None, "gate_up_proj_bias' is missing"),
        ("", torch.zeros(5, 64, 192), "gate_up_proj' is not part of the model"),
    ],
)
def test_wrong_blocks_are_refused_by_name(ending: str, value: Tensor | None, says: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), EXPERTS.format(2, "gate_up") + ending
    tensors.pop(name, None)
    save_file(tensors if value is None else {**tensors, name: value}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        logits_on_ranks(tmp_path, 1, [IDS])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 is not supported"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
    ],
)
def test_configs_that_ask_for_more_are_refused(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    save_family(tmp_path, ROW)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(CheckpointError, match=says):
        find_model(str(tmp_path))


def test_mxfp4_is_for_checkpoints_that_have_it(tmp_path: Path) -> None:
    save_family(tmp_path, ROW)
    with pytest.raises(ConfigError, match="quantization 'mxfp4' is for checkpoints that are quantised so"):
        prepare(ModelConfig(str(tmp_path), "tiny", quantization="mxfp4"), CacheConfig(), 0, 1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(CheckpointError, match="looked for"):
        find_model(str(tmp_path))


def test_random_experts_may_be_mxfp4(tmp_path: Path) -> None:
    save_family(tmp_path, ROW)
    (tmp_path / "model.safetensors").unlink()
    drawn: dict[str, Any] = {"load_format": "dummy", "quantization": "mxfp4"}
    one, two = (logits_on_ranks(tmp_path, ranks, [IDS], **drawn)[0] for ranks in (1, 2))
    assert relative_error(two, one) < 1e-2
    config = ModelConfig(str(tmp_path), "tiny", **drawn)
    held = prepare(config, CacheConfig(), 0, 1).holding
    assert held.num_bytes < prepare(replace(config, quantization="none"), CacheConfig(), 0, 1).holding.num_bytes
