"""Random adapters in PEFT's folders, and models into which they are merged."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(model: Any, targets: Sequence[str] = EVERY) -> dict[str, Any]:
    """The linear layers and embeddings of transformers' model whose names end in one of these."""
    named = model.named_modules()
    return {name: module for name, module in named if name.split(".")[-1] in targets and hasattr(module, "weight")}


def save_adapter(
    folder: Path,
    model: Any,
    rank: int | Callable[[str], int] = 8,
    targets: Sequence[str] = EVERY,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, Tensor]:
    """Writes an adapter of `model` and returns what it adds to each module's weight."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    values = {"peft_type": "LORA", "r": 8, "lora_alpha": 12, "target_modules": list(targets)} | config
    for name, module in modules_of(model, targets).items():
        is_embedding = isinstance(module, torch.nn.Embedding)
        outputs, inputs = reversed(module.weight.shape) if is_embedding else module.weight.shape
        own = rank if isinstance(rank, int) else rank(name)
        a = torch.randn(own, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, own, generator=generator) / own**0.5 / 8
        a, b = a.to(dtype), b.to(dtype)
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{name}.{each}": matrix for each, matrix in zip(names, (a, b), strict=True)}
        delta = scale_of(name, own, values) * (b.double() @ a.double())
        deltas[name] = delta.T if is_embedding else delta
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return deltas


def scale_of(name: str, rank: int, config: Mapping[str, Any]) -> float:
    """The factor of a module's product, by PEFT's rules."""
    alpha = next(
        (alpha for key, alpha in config.get("alpha_pattern", {}).items() if re.match(rf"(.*\.)?({key})$", name)),
        config["lora_alpha"],
    )
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def merged(model: Any, deltas: Mapping[str, Tensor]) -> Any:
    """A copy of transformers' model with the adapter in its weights. An embedding and a head that were one weight are
    two: an adapter changes the one that it names."""
    found = copy.deepcopy(model)
    if (head := found.get_output_embeddings()) is not None:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    modules = dict(found.named_modules())
    with torch.no_grad():
        for name, delta in deltas.items():
            modules[name].weight.copy_((modules[name].weight.double() + delta).float())
    return found


def greedy_tokens(model: Any, ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The tokens of transformers."""
    prompts = torch.tensor([list(ids)])
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(made[0, len(ids) :].tolist())
