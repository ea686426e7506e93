"""Tiny random checkpoints made by transformers, and this project's logits for them on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.cache.kv import KVCache
from allspan.worker.load.loader import load_model
from allspan.worker.models.model import Model
from allspan.worker.step.inputs import GroupInputs, StepInputs
from support.threads import ThreadWorld

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 101,
        "vocab_size": 131,
        "rope_parameters": LLAMA3_SCALING,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama2": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 2, "hidden_size": 96},
    "qwen2-yarn": {"model_type": "qwen2", "num_key_value_heads": 2, "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 56,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None, "head_dim": 20},
}
_DEFAULTS = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 77,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}


def save_tiny(folder: Path, name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Writes a random checkpoint of CONFIGS[name] and returns transformers' model of it, in `dtype`."""
    values = _DEFAULTS | CONFIGS[name] | overrides
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(3)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
    for parameter in model.parameters():  # not the rotary frequencies, which stay float32 when a model is loaded
        parameter.data = parameter.data.to(dtype)
    model.eval()
    model.save_pretrained(folder)
    return model


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """float32 [n, V]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0].float()
    return logits


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(vocab_size) for _ in range(length)]


def step_inputs(
    ids: Sequence[Sequence[int]], starts: Sequence[int], pages: Sequence[Sequence[int]], size: int
) -> StepInputs:
    """One step in which request r adds ids[r] from position starts[r] on; logits are wanted of every row."""
    positions = [range(start, start + len(new)) for start, new in zip(starts, ids, strict=True)]
    slots = [own[p // size] * size + p % size for where, own in zip(positions, pages, strict=True) for p in where]
    used = [own[: -(-where.stop // size)] for where, own in zip(positions, pages, strict=True)]

    def indptr(lengths: Sequence[int]) -> Tensor:
        return _int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])

    num_tokens = sum(map(len, ids))
    return StepInputs(
        ids=_int32([token for new in ids for token in new]),
        positions=_int32([p for where in positions for p in where]),
        slots=_int32(slots),
        qo_indptr=indptr([len(new) for new in ids]),
        page_indptr=indptr([len(own) for own in used]),
        page_indices=_int32([page for own in used for page in own]),
        kv_lens=_int32([where.stop for where in positions]),
        logits_rows=_int32(range(num_tokens)),
    )


def own_inputs(ids: Sequence[Sequence[int]], owners: Sequence[int], rank: int, inputs: StepInputs) -> StepInputs:
    """A step as the rank sees it that attends for the requests of which it is the owner alone; `inputs` are those of
    these requests."""
    mine = [rank == owner for new, owner in zip(ids, owners, strict=True) for _ in new]
    own = [row for row, is_mine in enumerate(mine) if is_mine]
    places = [own.index(row) if is_mine else -1 for row, is_mine in enumerate(mine)]
    return replace(
        inputs,
        ids=_int32([token for new in ids for token in new]),
        logits_rows=_int32(range(len(mine))),
        own_rows=_int32(own),
        own_places=_int32(places),
    )


def prefill(
    model: Model, prompts: Sequence[Sequence[int]], chunk: int, owners: Sequence[int] | None = None
) -> list[Tensor]:
    """This rank's logits [len, V_rank] of every prompt: all prompts side by side, `chunk` tokens of each a step.
    `owners`: the ranks that attend for the prompts; None: all ranks do."""
    size = model.cache_groups[0].spec.page_size
    counts = [-(-len(ids) // size) for ids in prompts]
    numbers = list(range(sum(counts) + 3))
    random.Random(7).shuffle(numbers)
    pages = [[numbers.pop() for _ in range(count)] for count in counts]
    model.bind_cache(*(KVCache(group.spec, sum(counts) + 3) for group in model.cache_groups))
    collected: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [r for r, ids in enumerate(prompts) if len(ids) > start]
        new = [prompts[r][start : start + chunk] for r in live]
        rank = model.holding.shard.rank
        mine = [i for i, r in enumerate(live) if owners is None or owners[r] == rank]
        inputs = step_inputs([new[i] for i in mine], [start] * len(mine), [pages[live[i]] for i in mine], size)
        if owners is not None:
            inputs = own_inputs(new, [owners[r] for r in live], rank, inputs)
        same = GroupInputs(inputs.slots, inputs.page_indptr, inputs.page_indices)
        logits = model.forward(replace(inputs, groups=(same,) * (len(model.cache_groups) - 1)))
        for r, part in zip(live, torch.split(logits.clone(), [len(ids) for ids in new]), strict=True):
            collected[r].append(part)
    return [torch.cat(parts) for parts in collected]


def logits_on_ranks(
    path: Path,
    num_ranks: int,
    prompts: Sequence[Sequence[int]],
    chunk: int = 1024,
    backend: str = "reference",
    cache: CacheConfig | None = None,
    world: ThreadWorld | None = None,
    owners: Sequence[int] | None = None,
    **config: Any,
) -> list[Tensor]:
    """float32 [len, V] for every prompt, put together from the ranks' columns. Ranks are threads of this process.
    `owners`: the ranks that attend for the prompts, with data-parallel attention."""
    world = world or ThreadWorld(num_ranks)
    has_whole = "all_gather_columns" in world.collectives[0].program_ops
    most = sum(min(chunk, len(ids)) for ids in prompts)

    def run(rank: int) -> list[Tensor]:
        settings = ModelConfig(str(path), "tiny", data_parallel_attention=owners is not None, **config)
        pages = cache or CacheConfig(page_size=16)
        model = load_model(settings, world.collectives[rank], op_set(backend), most, most, cache=pages)
        parts = prefill(model, prompts, chunk, owners)
        assert {part.shape[1] for part in parts} == {model.vocab_widths[0 if has_whole else rank]}
        return parts

    by_rank = world.run(run)
    if has_whole:
        assert all(torch.equal(a, b) for parts in by_rank for a, b in zip(parts, by_rank[0], strict=True))
        return by_rank[0]
    return [torch.cat([parts[r] for parts in by_rank], dim=1) for r in range(len(prompts))]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
